"""Tokenizers from Megatron's own flags, with no network.

Training never encodes text: of its tokenizer it uses the vocabulary size and the id that ends a document. What must
agree between preprocessing and training is therefore the ids in the file, the size and that id. Three ways lead there:

    SentencePieceTokenizer,        megatron-core's `build_tokenizer`, the very function that training calls: give
    GPTSentencePieceTokenizer,     training the same flags
    Llama2Tokenizer, TikTokenizer,
    NullTokenizer
    ByteLevelTokenizer             megatron-core's class of this name. Its parser does not offer it, so training names
                                   it by its numbers: NullTokenizer with the same size and end of document
    GPT2BPETokenizer,              megatron-core builds them with transformers, and looks for "gpt2" on the network
    HuggingFaceTokenizer           even when it has both files. Here the `tokenizers` library reads the same files;
                                   training names them by their numbers too. A Hugging Face folder, with transformers
                                   installed, goes through `build_tokenizer` and keeps its own flags

`build` returns with each tokenizer the flags to give to training.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from output_files import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Bytes are their own ids, and the first id that is no byte ends a document.
BYTES_IN_VOCABULARY = 256
BYTE_LEVEL_VOCAB_SIZE = BYTES_IN_VOCABULARY + 1

GPT2_EOD_TOKEN = "<|endoftext|>"

_BUILT_BY_MEGATRON = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
)
TOKENIZER_TYPES = ("ByteLevelTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer", *_BUILT_BY_MEGATRON)


@dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer and what training must be told about it.

    Attributes:
        tokenize: text -> ids, each in 0..vocab_size-1. May be called in a forked process.
        vocab_size: number of ids, before Megatron pads it.
        eod: the id that ends a document, None if the tokenizer has none.
        training_flags: Megatron flags under which training sees the same ids, size and end of document.
        note: what the user should know about those flags; "" if nothing.
    """

    tokenize: Callable[[str], list[int]]
    vocab_size: int
    eod: int | None
    training_flags: tuple[str, ...]
    note: str = ""


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Megatron's tokenizer flags, spelled out here so that --help need not import torch (a test compares them)."""
    group = parser.add_argument_group("tokenizer", "Megatron's own flags, and ByteLevelTokenizer and --eod-token")
    add = group.add_argument
    add("--tokenizer-type", choices=TOKENIZER_TYPES, required=True)
    add("--tokenizer-model", help="SentencePiece .model, tiktoken .json, Hugging Face tokenizer.json or its folder")
    add("--vocab-file", help="vocab.json of GPT-2 BPE")
    add("--merge-file", help="merges.txt of GPT-2 BPE")
    add("--vocab-size", type=int, help="TikTokenizer and NullTokenizer: number of ids")
    add("--tokenizer-metadata", dest="metadata_path")
    add("--tokenizer-special-tokens", dest="special_tokens", nargs="+")
    add("--tiktoken-pattern", choices=("v1", "v2"))
    add("--tiktoken-num-special-tokens", type=int, default=1000)
    add("--tokenizer-sentencepiece-legacy", action="store_true")
    add(
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        dest="tokenizer_sentencepiece_ignore_extra_whitespaces",
        action="store_false",
    )
    add("--tokenizer-hf-no-use-fast", action="store_true")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true")
    add("--trust-remote-code", action="store_true")
    add("--null-tokenizer-eod-id", type=int)
    add("--null-tokenizer-pad-id", type=int, default=-1)
    add("--eod-token", help="HuggingFaceTokenizer: the token that ends a document, where its files do not say")


def build(args: argparse.Namespace) -> BuiltTokenizer:
    """Builds the tokenizer that the flags of `add_tokenizer_flags` name. Opens no connection for files given by path.

    Raises:
        UserError: a flag or a file is missing, or the files are not what the type needs.
    """
    if args.tokenizer_type == "ByteLevelTokenizer":
        return _byte_level(args)
    if args.tokenizer_type == "GPT2BPETokenizer":
        return _gpt2_bpe(args)
    if args.tokenizer_type == "HuggingFaceTokenizer" and not _megatron_can_load_hugging_face(args):
        return _hugging_face(args)
    return _built_by_megatron(args)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hushes what torch and megatron-core say, when imported, about GPU packages: nothing that concerns this tool."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def numbers_as_flags(vocab_size: int, eod: int | None) -> tuple[str, ...]:
    """Training flags that stand for any tokenizer of this size and end of document."""
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size))
    return flags if eod is None else (*flags, "--null-tokenizer-eod-id", str(eod))


def _byte_level(args: argparse.Namespace) -> BuiltTokenizer:
    with quiet_imports():
        from megatron.core.tokenizers import MegatronTokenizer

    vocab_size = BYTE_LEVEL_VOCAB_SIZE if args.vocab_size is None else args.vocab_size
    if vocab_size < BYTE_LEVEL_VOCAB_SIZE:
        raise UserError(
            f"ByteLevelTokenizer needs {BYTE_LEVEL_VOCAB_SIZE} ids (256 bytes and the end of document), but "
            f"--vocab-size is {vocab_size}. Leave the flag out."
        )
    # Megatron's default for the end of document is id 0, which is also the byte 0: a file with zeros would fall apart.
    eod = BYTES_IN_VOCABULARY
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=vocab_size, _eos_id=eod, _pad_id=None
    )
    return BuiltTokenizer(tokenizer.tokenize, vocab_size, eod, numbers_as_flags(vocab_size, eod))


def _gpt2_bpe(args: argparse.Namespace) -> BuiltTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if not args.vocab_file or not args.merge_file:
        raise UserError(
            f"GPT2BPETokenizer needs --vocab-file and --merge-file, but got {args.vocab_file} and {args.merge_file}. "
            "Give both; tools/train_bpe.py makes them from your own text."
        )
    _require_file("--vocab-file", args.vocab_file)
    _require_file("--merge-file", args.merge_file)
    try:
        model = models.BPE.from_file(args.vocab_file, args.merge_file)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{args.vocab_file} and {args.merge_file} must be the vocab.json and merges.txt of one GPT-2 BPE: {error}. "
            "Check that they belong together."
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [GPT2_EOD_TOKEN, *(args.special_tokens or [])]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return _from_tokenizers_library(args, tokenizer, GPT2_EOD_TOKEN)


def _hugging_face(args: argparse.Namespace) -> BuiltTokenizer:
    from tokenizers import Tokenizer

    path = Path(_require_model(args))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--tokenizer-model of HuggingFaceTokenizer must be a tokenizer.json or a folder that holds one: {path} is "
            "neither. Download the model's tokenizer files first; this tool opens no connection."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file} is not a tokenizer of the `tokenizers` library: {error}. Check the file.") from error
    # Both are stored in the file and meant for inference; truncation would silently cut documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(args.special_tokens or [])
    return _from_tokenizers_library(args, tokenizer, args.eod_token or _declared_eod(file, tokenizer))


def _from_tokenizers_library(args: argparse.Namespace, tokenizer: Tokenizer, eod_token: str | None) -> BuiltTokenizer:
    # Its own threads do not survive a fork; the processes of --workers take their place.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if eod_token is not None and eod_token not in ids:
        raise UserError(f"the end-of-document token {eod_token!r} is not in the vocabulary. Give another --eod-token.")
    eod = None if eod_token is None else ids[eod_token]
    add_special_tokens = not args.tokenizer_hf_no_include_special_tokens

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    vocab_size = max(ids.values()) + 1  # not len(ids): ids may have gaps
    note = f"training never encodes text, so these numbers stand for the {args.tokenizer_type}"
    return BuiltTokenizer(tokenize, vocab_size, eod, numbers_as_flags(vocab_size, eod), note)


def _declared_eod(tokenizer_file: Path, tokenizer: Tokenizer) -> str | None:
    """The token that ends a document, by the files beside tokenizer.json, else the only special token there is."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = tokenizer_file.with_name(name)
        if file.is_file():
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return special[0] if len(special) == 1 else None


def _megatron_can_load_hugging_face(args: argparse.Namespace) -> bool:
    if importlib.util.find_spec("transformers") is None or args.eod_token is not None:
        return False
    return not Path(_require_model(args)).is_file()  # transformers takes a folder; from a lone file it gets no eod


def _built_by_megatron(args: argparse.Namespace) -> BuiltTokenizer:
    with quiet_imports():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
        from megatron.training.config import TokenizerConfig

    _check_megatron_files(args)
    defaults = vars(TokenizerConfig(pad_vocab_size=False))  # padding is the model's business, not the data's
    flags = {name: value for name, value in vars(args).items() if name in defaults}
    try:
        tokenizer = build_tokenizer(argparse.Namespace(**(defaults | flags)))
    except Exception as error:  # megatron-core asserts, often without a message
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error) or f"{type(error).__name__} at {where.name}: {where.line}"
        raise UserError(
            f"megatron-core cannot build {args.tokenizer_type} from these flags: {reason}. Check --tokenizer-model and "
            "the other tokenizer flags; training would fail in the same way."
        ) from error
    return BuiltTokenizer(tokenizer.tokenize, tokenizer.vocab_size, _eod_of(tokenizer), _same_flags(args))


def _check_megatron_files(args: argparse.Namespace) -> None:
    """What megatron-core leaves to a bare assert, said with the values."""
    if args.tokenizer_type == "NullTokenizer":
        if args.vocab_size is None:
            raise UserError("NullTokenizer needs --vocab-size, the number of ids. Give it here and in training.")
    elif args.tokenizer_type == "TikTokenizer":
        _require_file("--tokenizer-model", _require_model(args))
        _check_tiktoken_size(args)
    elif "WordPiece" in args.tokenizer_type:
        if importlib.util.find_spec("transformers") is None:
            raise UserError(f"{args.tokenizer_type} needs the transformers package. Install it with pip.")
    elif args.tokenizer_type != "HuggingFaceTokenizer":
        _require_file("--tokenizer-model", _require_model(args))


def _check_tiktoken_size(args: argparse.Namespace) -> None:
    """megatron-core takes exactly vocab_size - special tokens entries of the file, and assumes 131072 by default."""
    with quiet_imports():
        from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import DEFAULT_TIKTOKEN_MAX_VOCAB

    try:
        entries = json.loads(Path(args.tokenizer_model).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"--tokenizer-model of TikTokenizer must be a JSON list of rank, token_bytes and token_str, but "
            f"{args.tokenizer_model} is not JSON: {error}. Convert the vocabulary first."
        ) from error
    size = args.vocab_size or DEFAULT_TIKTOKEN_MAX_VOCAB
    special = args.tiktoken_num_special_tokens
    largest = len(entries) + special
    if size > largest:
        raise UserError(
            f"--vocab-size of TikTokenizer ({size}{'' if args.vocab_size else ' by default'}) may be at most the "
            f"file's tokens plus --tiktoken-num-special-tokens: {len(entries)} + {special} = {largest}. Pass "
            f"--vocab-size {largest}, here and in training."
        )


def _eod_of(tokenizer: object) -> int | None:
    try:
        eod = tokenizer.eod  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return eod if eod is not None and eod >= 0 else None  # SentencePiece says -1 for "none"


def _same_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The tokenizer flags that differ from their defaults, as the user would type them again."""
    parser = argparse.ArgumentParser(add_help=False)
    add_tokenizer_flags(parser)
    flags: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        flags.append(action.option_strings[0])
        if action.nargs != 0:
            flags += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return tuple(flags)


def _require_model(args: argparse.Namespace) -> str:
    if not args.tokenizer_model:
        raise UserError(f"{args.tokenizer_type} needs --tokenizer-model. Give the path of its file.")
    return args.tokenizer_model


def _require_file(flag: str, path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"{flag} must be a file: {path} is not. Check the path.")
