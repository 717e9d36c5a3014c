"""Documents out of JSON lines or plain text, each with the file and line that it came from.

Reading (cheap, one process) and parsing (many processes) are apart: `read_chunks` yields undecoded pieces,
`parse_chunk` turns a piece into texts. A piece never spans two files.

Formats:
    jsonl        one JSON object per line; blank lines are passed over
    text         one document per file
    paragraphs   one document per run of lines between blank lines

Any input may be gzip-compressed; that is seen by its first two bytes, not by its name.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from output_files import UserError

FORMATS = ("jsonl", "text", "paragraphs")

# A chunk is the unit of work of one worker: large enough (about 50 ms of tokenizing) to hide the cost of passing it,
# small enough for a progress bar and for spreading one small file over all workers.
CHUNK_BYTES = 256 * 1024

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Undecoded records of one file.

    Attributes:
        path: the file, as the user named it.
        records: (number of the record's first line, counted from 1; its bytes).
        position_bytes: how much of all input files, as stored, has been read at the end of this chunk.
    """

    path: str
    records: tuple[tuple[int, bytes], ...]
    position_bytes: int


@dataclass(frozen=True)
class BadDocument:
    """A record that cannot be used: where it stands and what is wrong with it."""

    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


class BadRecord(ValueError):
    """What is wrong with one record. `line_offset`: lines between the record's start and the fault."""

    def __init__(self, problem: str, line_offset: int = 0) -> None:
        super().__init__(problem)
        self.line_offset = line_offset


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to read, the same in every tool."""
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files or patterns; gzip is accepted")
    group.add_argument(
        "--input-format",
        choices=FORMATS,
        default="jsonl",
        help="jsonl: one JSON object per line (default); text: one document per file; paragraphs: one document per "
        "run of lines between blank lines",
    )
    group.add_argument(
        "--json-key",
        "--json-keys",
        dest="json_keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="where the text stands in each JSON object; several keys give several outputs (default: text)",
    )


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that `--input` names, in the order given; a pattern's files in the order of their names.

    Raises:
        UserError: a name that is no readable file, or a pattern that matches nothing.
    """
    paths: list[str] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        if not matches:
            raise UserError(f"every --input must exist: {pattern!r} names no file. Check the path.")
        paths.extend(matches)
    for path in paths:
        if not Path(path).is_file() or not os.access(path, os.R_OK):
            raise UserError(f"every --input must be a readable file: {path} is not. Name the files, or a pattern.")
    return paths


def total_bytes(paths: Iterable[str]) -> int:
    """Size of the files as stored (compressed where they are): the end of `Chunk.position_bytes`."""
    return sum(Path(path).stat().st_size for path in paths)


def read_chunks(paths: Sequence[str], input_format: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Reads the files in order.

    Raises:
        UserError: a file that cannot be read to its end (a truncated gzip file, say). Unlike a bad record this cannot
            be skipped: how much is missing is unknown.
    """
    split = {"jsonl": _lines, "text": _whole, "paragraphs": _paragraphs}[input_format]
    position = 0
    for path in paths:
        line = 1
        with open(path, "rb") as stored:
            try:
                pending: list[tuple[int, bytes]] = []
                pending_bytes = 0
                for line, record in split(_opened(stored)):
                    pending.append((line, record))
                    pending_bytes += len(record)
                    if pending_bytes >= chunk_bytes:
                        yield Chunk(path, tuple(pending), position + stored.tell())
                        pending, pending_bytes = [], 0
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(
                    f"{path}: cannot be read beyond line {line}: {error}. Make the file complete again (for a gzip "
                    "file: check it with gzip -t), or leave it out of --input."
                ) from error
            position += stored.seek(0, io.SEEK_END)
            if pending:
                yield Chunk(path, tuple(pending), position)


def parse_chunk(
    chunk: Chunk, input_format: str, keys: Sequence[str]
) -> Iterator[tuple[int, tuple[str, ...] | BadDocument]]:
    """For each record of the chunk: its line, and its text for each key or what is wrong with it."""
    for line, record in chunk.records:
        try:
            texts = _json_texts(record, keys) if input_format == "jsonl" else (_decoded(record),)
        except BadRecord as bad:
            line += bad.line_offset
            yield line, BadDocument(chunk.path, line, str(bad))
        else:
            yield line, texts


def read_texts(paths: Sequence[str], input_format: str, key: str, bad: list[BadDocument]) -> Iterator[str]:
    """All texts in one process, for tools that have no workers. Bad records are added to `bad`."""
    for chunk in read_chunks(paths, input_format):
        for _, parsed in parse_chunk(chunk, input_format, (key,)):
            if isinstance(parsed, BadDocument):
                bad.append(parsed)
            else:
                yield parsed[0]


def _opened(stored: BinaryIO) -> BinaryIO:
    magic = stored.read(len(_GZIP_MAGIC))
    stored.seek(0)
    return gzip.open(stored, "rb") if magic == _GZIP_MAGIC else stored  # type: ignore[return-value]


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(_UTF8_MARK)
        if line.strip():
            yield number, line


def _whole(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    yield 1, stream.read().removeprefix(_UTF8_MARK)


def _paragraphs(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    first, lines, number = 1, [], 0
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(_UTF8_MARK)
        if line.strip():
            first = first if lines else number
            lines.append(line)
        elif lines:
            yield first, b"".join(lines).rstrip(b"\r\n")
            lines = []
    if lines:
        yield first, b"".join(lines).rstrip(b"\r\n")


def _decoded(record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"text must be UTF-8, but byte 0x{record[error.start]:02x} at offset {error.start} is not ({error.reason})",
            line_offset=record.count(b"\n", 0, error.start),
        ) from error


def _json_texts(record: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        document = json.loads(_decoded(record))
    except json.JSONDecodeError as error:
        raise BadRecord(
            f"not JSON: {error.msg} at column {error.colno}: {_excerpt(record)} (plain text needs --input-format text)"
        ) from error
    except RecursionError as error:
        raise BadRecord("not usable: JSON nested too deeply") from error
    if not isinstance(document, dict):
        raise BadRecord(f"must be a JSON object, but is {_json_kind(document)}: {_excerpt(record)}")
    return tuple(_text_under(document, key) for key in keys)


def _text_under(document: dict[str, object], key: str) -> str:
    if key not in document:
        raise BadRecord(f"no key {key!r}; this object's keys are {sorted(document)[:10]} (see --json-key)")
    text = document[key]
    if not isinstance(text, str):
        raise BadRecord(f"the value of {key!r} must be a string, but is {_json_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer can take it
        raise BadRecord(f"the value of {key!r} holds {text[error.start]!r}, half of a surrogate pair") from error
    return text


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "true or false", int: "a number"}
    return kinds.get(type(value), "a number")


def _excerpt(record: bytes) -> str:
    text = record.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
