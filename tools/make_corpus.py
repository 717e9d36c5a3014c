#!/usr/bin/env python
"""Writes a small corpus of English and code that is already on this machine: what comes with every Python.

    python tools/make_corpus.py --output corpus.jsonl

The English is the language reference that help() shows (pydoc_data.topics), the code the standard library's sources
with their docstrings. Nothing is downloaded. The same Python version gives the same bytes. Documents stand in an order
that looks random but is fixed, so that the parts that Megatron's --split cuts off are alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from output_files import Interrupted, OutputFiles, UserError, signals_as_exceptions

# Megabytes of 10^6 bytes. The byte tokenizer takes a few seconds for this many.
DEFAULT_MAX_MB = 8.0

# Tables of numbers (encodings), what other tools installed, sources broken on purpose, and the topics a second time.
_LEFT_OUT = {"encodings", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """A text, and a name for it that is the same on every machine."""

    name: str
    text: str

    def as_line(self) -> bytes:
        return json.dumps({"text": self.text, "source": self.name}, ensure_ascii=False).encode("utf-8") + b"\n"

    def order(self) -> bytes:
        return hashlib.sha256(self.name.encode("utf-8")).digest()


def topics() -> Iterator[Document]:
    """The pages of help(), one document each."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError as error:
        raise UserError(
            "the corpus needs pydoc_data, which this Python lacks. Install the full Python, or bring your own text to "
            "tools/preprocess_data.py."
        ) from error
    for name, text in pages.items():
        yield Document(f"pydoc_data/topics/{name}", text)


def sources(library: Path, tests: bool) -> Iterator[Document]:
    """The standard library's .py files that are UTF-8: its tests, or all but its tests."""
    for path in library.rglob("*.py"):
        parts = path.relative_to(library).parts
        if _LEFT_OUT.intersection(parts) or bool(_TESTS.intersection(parts)) != tests:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files are in other encodings on purpose
        if text.strip():
            yield Document("/".join(("Lib", *parts)), text)


def select(groups: Iterable[Iterable[Document]], max_bytes: int) -> list[Document]:
    """Takes from each group in turn, in the fixed order, until the next document would exceed the bound."""
    chosen: list[Document] = []
    size = 0
    for group in groups:
        for document in sorted(group, key=Document.order):
            size += len(document.as_line())
            if size > max_bytes:
                return sorted(chosen, key=Document.order)
            chosen.append(document)
    return sorted(chosen, key=Document.order)


def make_corpus(output: Path, max_mb: float, overwrite: bool) -> tuple[int, int]:
    """Writes the corpus and returns (documents, bytes).

    Raises:
        UserError: the output exists, the bound leaves no document, or this Python has no sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    # Tests last: they are code of another kind, wanted only by who asks for more than the library holds.
    groups = (topics(), sources(library, tests=False), sources(library, tests=True))
    with OutputFiles([output], overwrite) as out:
        documents = select(groups, int(max_mb * 1e6))
        if not documents:
            raise UserError(f"--max-mb must leave room for a document, but {max_mb} does not. Try {DEFAULT_MAX_MB}.")
        lines = [document.as_line() for document in documents]
        out.partial(output).write_bytes(b"".join(lines))
    return len(documents), sum(map(len, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for the user's mistake, 128 + n after signal n."""
    parser = argparse.ArgumentParser(prog="make_corpus.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--max-mb", type=float, default=DEFAULT_MAX_MB, help=f"size bound (default {DEFAULT_MAX_MB:g})")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    args = parser.parse_args(argv)
    try:
        with signals_as_exceptions():
            documents, size = make_corpus(args.output, args.max_mb, args.overwrite)
    except UserError as error:
        print(f"make_corpus.py: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"make_corpus.py: ended by {interrupted}; nothing was written", file=sys.stderr)
        return 128 + interrupted.signal_number
    print(f"{args.output}: {documents} documents, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
