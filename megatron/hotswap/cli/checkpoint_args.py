"""The flags that a Megatron checkpoint was saved with, read without torch and without running anything in it.

A torch_dist checkpoint is a folder: `.metadata` is a pickle that says in which file, at which offset, each piece lies;
the piece `common_state` is a zip with a pickle in it, which holds Megatron's argument namespace. Both are read by an
unpickler that builds empty shells for every class but the namespace, so a hostile file can at worst be refused.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

#: A checkpoint's list of pieces and its arguments are far smaller; more than this is not read.
_PIECE_BYTES_MAX = 64 << 20


class _Shell:
    """Stands for an object of any class: takes what it is given and keeps its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return hash(self._fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and self._fields() == other._fields()

    def _fields(self) -> tuple[str, ...]:
        return tuple(sorted(map(repr, getattr(self, "__dict__", {}).items())))

    def append(self, item: Any) -> None:
        """Some classes are filled like lists."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Some are filled like dicts."""


class _Unpickler(pickle.Unpickler):
    _ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012 - constant
        ("argparse", "Namespace"): argparse.Namespace,
        ("collections", "OrderedDict"): collections.OrderedDict,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self._ALLOWED.get((module, name), _Shell)

    def persistent_load(self, pid: Any) -> Any:
        return None


def saved_flags(folder: Path, iteration: str) -> dict[str, Any]:
    """Megatron's arguments of the checkpoint, by name; empty where this kind of checkpoint keeps them elsewhere.

    Whatever cannot be read here is left to Megatron, which checks again when it loads.
    """
    name = iteration if iteration == "release" else f"iter_{int(iteration):07d}" if iteration.isdigit() else None
    if name is None:
        return {}
    try:
        return _read(folder / name)
    except Exception:  # damaged, of another version or another format: not for this check to judge
        return {}


def _read(folder: Path) -> dict[str, Any]:
    common = folder / "common.pt"
    raw = common.read_bytes() if common.is_file() else _common_state(folder)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        state = _Unpickler(io.BytesIO(archive.read(inner))).load()
    if isinstance(state, list):  # torch_dist wraps it: one shard of one
        (state,) = state
    args = state["args"] if isinstance(state, dict) else None
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _common_state(folder: Path) -> bytes:
    metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    for index, place in metadata.state["storage_data"].items():
        if "common_state" in repr(index.__dict__):
            info = place.state
            if info["length"] > _PIECE_BYTES_MAX:
                break
            with open(folder / info["relative_path"], "rb") as file:
                file.seek(info["offset"])
                return file.read(info["length"])
    raise LookupError(f"{folder} has no piece named common_state")
