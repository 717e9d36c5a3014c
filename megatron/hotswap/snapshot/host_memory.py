"""How much more host memory this process may take: what the machine has, or less where a control group (cgroup) limits it.

A job under Slurm or in a container has a limit of its own. Its memory can be full while the machine's is not, and the kernel then
kills a process instead of refusing the memory; so this has to be known before anything is taken. Shared memory counts against it
like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Page cache and caches of the kernel, which make room when memory is asked for. Shared memory is in neither.
_RECLAIMABLE_V2 = ("inactive_file", "active_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can still be taken, and what limits them, in words.

    Args:
        root: in front of /proc and of every mount point; for tests.
    """
    best = _machine(root), "available host memory"
    for found in _groups(root):
        best = min(best, found)
    return best


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """What is left in every group that this process is in, from its own up to the mount's top: each of them limits."""
    for mount, version, group in _hierarchies(root):
        inside = root / str(mount).lstrip("/")
        for folder in [inside / group, *(inside / group).parents]:
            if folder != inside and inside not in folder.parents:
                break
            left = _left_v2(folder) if version == 2 else _left_v1(folder)
            if left is not None:
                limit_file = "memory.max" if version == 2 else "memory.limit_in_bytes"
                yield left, f"{limit_file} of the control group {mount / folder.relative_to(inside)}, less what it uses"


def _hierarchies(root: Path) -> Iterator[tuple[Path, int, str]]:
    """(mount point, 1 or 2, this process's group below it) of the hierarchies that can limit memory."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else None
        if version not in groups:
            continue
        top, mount = before.split(" ")[3:5]
        # In a container only a part of the hierarchy may be mounted, and the group's path may still count from its top.
        path = groups[version]
        inside = path.removeprefix(top) if path == top or path.startswith(top.rstrip("/") + "/") else path if top == "/" else "/"
        yield Path(mount), version, inside.strip("/")


def _left_v2(folder: Path) -> int | None:
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    return None if limit is None or used is None else _left(limit, used, folder, _RECLAIMABLE_V2)


def _left_v1(folder: Path) -> int | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    return None if limit is None or used is None else _left(limit, used, folder, _RECLAIMABLE_V1)


def _left(limit: int, used: int, folder: Path, reclaimable: tuple[str, ...]) -> int:
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
    return max(0, limit - max(0, used - sum(int(stat.get(name, 0)) for name in reclaimable)))


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file (the top of version 2 has none)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
