#!/usr/bin/env python
"""Trains a byte-level BPE, as GPT-2's, on your own text.

    python tools/train_bpe.py --input corpus.jsonl --output-dir bpe --vocab-size 8192

writes into bpe/ one vocabulary in two forms: vocab.json and merges.txt (GPT2BPETokenizer of
tools/preprocess_data.py), and tokenizer.json with tokenizer_config.json (HuggingFaceTokenizer, there and, with the
transformers package installed, in training). Any text can be encoded: what was never seen falls back to its bytes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from documents import BadDocument, add_input_flags, find_inputs, read_texts
from output_files import Interrupted, OutputFiles, UserError, signals_as_exceptions
from text_tokenizers import BYTES_IN_VOCABULARY, GPT2_EOD_TOKEN, numbers_as_flags

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The configuration last: it makes the folder one that Hugging Face's loader accepts.
FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")

# Enough for text of one language in the megabytes; GPT-2 itself has 50257.
DEFAULT_VOCAB_SIZE = 8192


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_bpe.py", description=(__doc__ or "").split("\n\n")[0])
    add_input_flags(parser)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for the files; created if missing")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="ids, bytes and eod included")
    parser.add_argument("--min-frequency", type=int, default=2, help="a pair seen less often is not merged (default 2)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    args = parser.parse_args(argv)
    smallest = BYTES_IN_VOCABULARY + 1
    if args.vocab_size < smallest:
        raise UserError(
            f"--vocab-size must be at least {smallest} (the bytes and {GPT2_EOD_TOKEN}), but is {args.vocab_size}."
        )
    if len(args.json_keys) > 1:
        raise UserError(f"one vocabulary is trained from one key, but --json-key is {args.json_keys}. Give one.")
    return args


def train(texts: Iterator[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """Trains on the texts. The vocabulary is smaller than asked for where the text has too few pairs.

    Returns:
        A `tokenizers.Tokenizer`; the id of GPT2_EOD_TOKEN is 0, the bytes follow.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[GPT2_EOD_TOKEN],
        # Every byte, seen or not: what makes any text encodable.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, out: OutputFiles) -> None:
    """Writes the two forms. merges.txt is written here: the library's own writer chooses its file names."""
    model = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    contents = {
        "vocab.json": json.dumps(model["vocab"], ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": GPT2_EOD_TOKEN}, indent=2
        ),
    }
    for name in FILES:
        out.partial(folder / name).write_text(contents[name], encoding="utf-8")


def train_bpe(argv: Sequence[str] | None) -> None:
    args = parse_arguments(argv)
    inputs = find_inputs(args.input)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with OutputFiles([args.output_dir / name for name in FILES], args.overwrite) as out:
        bad: list[BadDocument] = []
        texts = read_texts(inputs, args.input_format, args.json_keys[0], bad)
        tokenizer = train(texts, args.vocab_size, args.min_frequency)
        # Raised only here: an exception inside the iterator would reach us through the library, reworded.
        if bad:
            raise UserError(f"{bad[0]}. Correct it ({len(bad)} bad in all); nothing was written.")
        save(tokenizer, args.output_dir, out)
    report(args, tokenizer.get_vocab_size())


def report(args: argparse.Namespace, vocab_size: int) -> None:
    asked = f", of {args.vocab_size} asked for: the text has no more pairs" if vocab_size < args.vocab_size else ""
    print(f"{args.output_dir}: {vocab_size} ids{asked}")
    folder = args.output_dir
    flags = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt"), "--append-eod"]
    print("preprocess with:", shlex.join(["--tokenizer-type", "GPT2BPETokenizer", *flags]))
    print("train with:", shlex.join(numbers_as_flags(vocab_size, eod=0)))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for the user's mistake, 128 + n after signal n."""
    try:
        with signals_as_exceptions():
            train_bpe(argv)
    except UserError as error:
        print(f"train_bpe.py: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"train_bpe.py: ended by {interrupted}; nothing was written", file=sys.stderr)
        return 128 + interrupted.signal_number
    return 0


if __name__ == "__main__":
    sys.exit(main())
