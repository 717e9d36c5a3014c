"""Slurm's lists, without scontrol: hosts ("n[1-3,07],login") and counts per node ("2(x3),1")."""

from __future__ import annotations

import re
from collections.abc import Iterable


def expand_hosts(text: str) -> list[str]:
    """In order: "n[1-3,07],login" -> ["n1", "n2", "n3", "n07", "login"]."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]+|\[[^\]]*\])+", text):
        found = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part):
            numbers = list(_numbers(piece))
            found = [before + after for before in found for after in numbers]
        hosts += found
    return hosts


def _numbers(piece: str) -> Iterable[str]:
    if not piece.startswith("["):
        yield piece
        return
    for span in piece[1:-1].split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def expand_counts(text: str) -> list[int]:
    """For each node: "2(x3),1" -> [2, 2, 2, 1]."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
