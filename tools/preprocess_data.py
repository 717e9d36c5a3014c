#!/usr/bin/env python
"""Turns text into the .bin and .idx files that Megatron trains on.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 2

writes data/corpus_text_document.bin and .idx; `--data-path data/corpus_text_document` trains on them, together with
the tokenizer flags that this tool prints at its end. Both files appear complete or not at all, and their bytes do not
depend on the number of workers.

One process reads and writes, in order; the workers parse and tokenize chunks of a few hundred kilobytes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from documents import (
    BadDocument,
    Chunk,
    add_input_flags,
    find_inputs,
    parse_chunk,
    read_chunks,
    total_bytes,
)
from output_files import Interrupted, OutputFiles, UserError, signals_as_exceptions
from progress import Progress
from text_tokenizers import BuiltTokenizer, add_tokenizer_flags, build, quiet_imports

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

# Chunks in flight per worker. Two keep it busy while the writer is at work; more only cost memory.
CHUNKS_PER_WORKER = 2

# Bad lines shown one by one with --skip-bad; the rest is only counted.
BAD_LINES_SHOWN = 5

_DTYPES: dict[str, type[np.integer]] = {"uint16": np.uint16, "int32": np.int32}


@dataclass(frozen=True)
class Encoder:
    """What a worker does to a chunk. Immutable: made before the workers are forked, and inherited by them."""

    tokenizer: BuiltTokenizer
    dtype: type[np.integer]
    append_eod: bool
    input_format: str
    keys: tuple[str, ...]
    stop_at_bad: bool

    def encode_chunk(self, chunk: Chunk) -> EncodedChunk:
        """Tokenizes a chunk's documents in order. With `stop_at_bad` what follows the first bad one is left out."""
        result = EncodedChunk(chunk.position_bytes, [KeyTokens() for _ in self.keys])
        tokens: list[list[np.ndarray]] = [[] for _ in self.keys]
        for line, parsed in parse_chunk(chunk, self.input_format, self.keys):
            encoded = parsed if isinstance(parsed, BadDocument) else self._encode_texts(chunk.path, line, parsed)
            if isinstance(encoded, BadDocument):
                result.bad.append(encoded)
                if self.stop_at_bad:
                    break
                continue
            for key_tokens, ids, result_of_key in zip(tokens, encoded, result.keys, strict=True):
                if ids.size == 0:
                    result_of_key.empty += 1
                    continue
                key_tokens.append(ids)
                result_of_key.lengths.append(ids.size)
        for key_tokens, result_of_key in zip(tokens, result.keys, strict=True):
            if key_tokens:
                result_of_key.ids = np.concatenate(key_tokens)
        return result

    def _encode_texts(self, path: str, line: int, texts: Iterable[str]) -> list[np.ndarray] | BadDocument:
        try:
            return [self._encode(text) for text in texts]
        except Exception as error:  # whatever a tokenizer raises: what matters is which line it was
            return BadDocument(path, line, f"the tokenizer refuses this text: {type(error).__name__}: {error}")

    def _encode(self, text: str) -> np.ndarray:
        """Text -> ids of `self.dtype`, shape [n]; n is 0 for a text without tokens, which gets no end of document."""
        ids = np.array(self.tokenizer.tokenize(text), dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.tokenizer.vocab_size):
            raise ValueError(f"ids {ids.min()}..{ids.max()} are not all in 0..{self.tokenizer.vocab_size - 1}")
        if ids.size and self.append_eod and self.tokenizer.eod is not None:
            ids = np.append(ids, self.tokenizer.eod)
        return ids.astype(self.dtype)


@dataclass
class KeyTokens:
    """The documents of one chunk under one key.

    Attributes:
        ids: shape [sum of lengths]: all documents' ids, one after another.
        lengths: tokens per document, end of document included.
        empty: documents left out because they have no tokens.
    """

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    lengths: list[int] = field(default_factory=list)
    empty: int = 0


@dataclass
class EncodedChunk:
    """A chunk's tokens for each key, and its bad records, both in the order of the input."""

    position_bytes: int
    keys: list[KeyTokens]
    bad: list[BadDocument] = field(default_factory=list)


@dataclass
class Totals:
    """What a run did; printed at its end. Per key: `documents`, `tokens`, `empty`."""

    documents: list[int]
    tokens: list[int]
    empty: list[int]
    bad: int = 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Turns JSON lines or plain text into the .bin/.idx files that Megatron's --data-path takes.",
    )
    add_input_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx for each key")
    group.add_argument("--overwrite", action="store_true", help="replace files that exist")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    group.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help="how an id is stored; auto (default) is Megatron's choice by the size of the vocabulary",
    )
    group.add_argument("--skip-bad", action="store_true", help="leave out lines that cannot be used, and count them")
    group.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: the usable CPUs")
    add_tokenizer_flags(parser)
    args = parser.parse_args(argv)
    if args.workers < 1:
        raise UserError(f"--workers must be at least 1, but is {args.workers}.")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise UserError(f"each --json-key may be given once, but got {args.json_keys}.")
    if args.input_format != "jsonl" and len(args.json_keys) > 1:
        raise UserError(f"--input-format {args.input_format} has no keys, but got --json-key {args.json_keys}.")
    return args


def choose_dtype(name: str, vocab_size: int) -> type[np.integer]:
    """The type that ids are stored in.

    Raises:
        UserError: the largest id does not fit the type asked for.
    """
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType

    dtype: type[np.integer] = DType.optimal_dtype(vocab_size) if name == "auto" else _DTYPES[name]
    largest = np.iinfo(dtype).max
    if vocab_size - 1 > largest:
        raise UserError(
            f"a vocabulary must fit its dtype: {vocab_size} ids need 0..{vocab_size - 1}, but {dtype.__name__} ends at "
            f"{largest}. Pass --dtype auto."
        )
    return dtype


def make_encoder(args: argparse.Namespace, tokenizer: BuiltTokenizer) -> Encoder:
    if args.append_eod and tokenizer.eod is None:
        raise UserError(
            f"--append-eod needs an end-of-document id, but this {args.tokenizer_type} has none. Name the token with "
            "--eod-token (HuggingFaceTokenizer), give the tokenizer one, or leave --append-eod out."
        )
    dtype = choose_dtype(args.dtype, tokenizer.vocab_size)
    return Encoder(tokenizer, dtype, args.append_eod, args.input_format, tuple(args.json_keys), not args.skip_bad)


def output_paths(prefix: str, keys: Iterable[str]) -> list[Path]:
    """PREFIX_KEY_document.bin and .idx for each key, the index last: it is what says that the pair is complete."""
    stems = [f"{prefix}_{key}_document" for key in keys]
    return [Path(f"{stem}.{kind}") for stem in stems for kind in ("bin", "idx")]


def encode_in_order(encoder: Encoder, chunks: Iterable[Chunk], workers: int) -> Generator[EncodedChunk, None, None]:
    """`encoder.encode_chunk` over forked processes: results in the order of the chunks, a bounded number in memory.

    Raises:
        UserError: a worker died (out of memory, killed).
    """
    # Forked after the imports, so that a worker starts at once and has the encoder without its being pickled.
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, start_worker, (os.getpid(), encoder))
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(encode_in_worker, chunk))
            if len(pending) >= workers * CHUNKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process ended before its work did: killed, or out of memory. Use fewer --workers, or look into "
            "the kernel's log."
        ) from error
    finally:
        if pending:  # stopped early: nobody wants what the workers are at
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown(wait=True, cancel_futures=True)


# What this worker process encodes with; set once, at its start.
_worker_encoder: Encoder | None = None


def start_worker(parent: int, encoder: Encoder) -> None:
    """Leaves signals to the parent, and ends with it however it ends."""
    import ctypes

    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent winds the workers up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # A worker waits on a pipe whose other end it holds itself, so a parent's sudden death would leave it there forever.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def encode_in_worker(chunk: Chunk) -> EncodedChunk:
    assert _worker_encoder is not None, "start_worker runs first"
    return _worker_encoder.encode_chunk(chunk)


def encoded(args: argparse.Namespace, encoder: Encoder, inputs: list[str]) -> Generator[EncodedChunk, None, None]:
    """The input's chunks, encoded, in order. Close it to end the workers."""
    chunks = read_chunks(inputs, args.input_format)
    if args.workers > 1:
        yield from encode_in_order(encoder, chunks, args.workers)
    else:
        yield from map(encoder.encode_chunk, chunks)


def write_documents(builder: IndexedDatasetBuilder, tokens: KeyTokens) -> None:
    start = 0
    for length in tokens.lengths:
        # One sequence per document, which is what Megatron's GPT dataset expects.
        builder.add_document(tokens.ids[start : start + length], [length])
        start += length


def run(args: argparse.Namespace, encoder: Encoder, inputs: list[str], out: OutputFiles) -> Totals:
    """Reads, tokenizes and writes everything under the partial names of `out`.

    Raises:
        UserError: a bad record without --skip-bad, an input that cannot be read, or nothing to write.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    paths = output_paths(args.output_prefix, args.json_keys)
    pairs = [(out.partial(binary), out.partial(index)) for binary, index in zip(paths[::2], paths[1::2], strict=True)]
    builders = [IndexedDatasetBuilder(str(binary), dtype=encoder.dtype) for binary, _ in pairs]
    keys = len(args.json_keys)
    totals = Totals([0] * keys, [0] * keys, [0] * keys)
    with (
        contextlib.closing(encoded(args, encoder, inputs)) as chunks,
        Progress("tokenizing", total_bytes(inputs)) as bar,
    ):
        for chunk in chunks:
            count_bad(chunk.bad, totals, args.skip_bad, bar)
            for key, tokens in enumerate(chunk.keys):
                write_documents(builders[key], tokens)
                totals.documents[key] += len(tokens.lengths)
                totals.tokens[key] += sum(tokens.lengths)
                totals.empty[key] += tokens.empty
            bar.update(chunk.position_bytes)
    for key, documents in zip(args.json_keys, totals.documents, strict=True):
        if documents == 0:
            raise UserError(
                f"there must be at least one document with text under {key!r}, but {len(inputs)} input file(s) gave "
                f"none ({totals.bad} bad). Check --input and --input-format."
            )
    for builder, (_, index) in zip(builders, pairs, strict=True):
        builder.finalize(str(index))
    return totals


def count_bad(bad: list[BadDocument], totals: Totals, skip: bool, progress: Progress) -> None:
    for document in bad:
        if not skip:
            raise UserError(f"{document}. Correct it, or pass --skip-bad to leave such lines out and count them.")
        totals.bad += 1
        if totals.bad <= BAD_LINES_SHOWN:
            progress.say(f"left out: {document}")
        elif totals.bad == BAD_LINES_SHOWN + 1:
            progress.say("left out: more, counted at the end")


def report(args: argparse.Namespace, encoder: Encoder, totals: Totals, seconds: float) -> None:
    """What was done, and how to train on it, on stdout."""
    tokenizer = encoder.tokenizer
    for key, documents, tokens, empty in zip(
        args.json_keys, totals.documents, totals.tokens, totals.empty, strict=True
    ):
        left_out = f", {empty} empty left out" if empty else ""
        print(f"{args.output_prefix}_{key}_document: {documents} documents, {tokens} tokens{left_out}")
    if totals.bad:
        print(f"{totals.bad} bad documents left out (--skip-bad)")
    print(f"{tokenizer.vocab_size} ids, stored as {encoder.dtype.__name__}, in {seconds:.1f} s")
    if tokenizer.note:
        print(f"note: {tokenizer.note}")
    data_paths = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
    print("train with:", shlex.join(["--data-path", *data_paths, *tokenizer.training_flags]))


def preprocess(argv: Sequence[str] | None) -> None:
    args = parse_arguments(argv)
    inputs = find_inputs(args.input)
    # Claimed before the slow imports: a name that is taken is then said at once.
    with OutputFiles(output_paths(args.output_prefix, args.json_keys), args.overwrite) as out:
        encoder = make_encoder(args, build(args))
        started = time.monotonic()
        totals = run(args, encoder, inputs, out)
    report(args, encoder, totals, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for the user's mistake, 128 + n after signal n."""
    try:
        with signals_as_exceptions():
            preprocess(argv)
    except UserError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"preprocess_data.py: ended by {interrupted}; nothing was written", file=sys.stderr)
        return 128 + interrupted.signal_number
    return 0


if __name__ == "__main__":
    sys.exit(main())
