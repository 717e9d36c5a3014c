"""snapshot/host_memory.py: the smallest limit counts, be it the machine's or that of a control group of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.hotswap.errors import UsageError
from megatron.hotswap.snapshot import host_memory, slots

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_MOUNTS = "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


def machine(root: Path, mounts: str, groups: str, available_kib: int = 8 * GIB // 1024) -> Path:
    """A machine's /proc, in the kernel's formats."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:    {available_kib} kB\nBuffers: 7 kB\n")
    (root / "proc/self/mountinfo").write_text(f"{OTHER_MOUNTS}\n{mounts}".strip() + "\n")
    (root / "proc/self/cgroup").write_text(f"{groups}\n")
    return root


def group(folder: Path, version: int, limit: str, used: int, **stat: int) -> None:
    """A control group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


def test_without_a_group_it_is_the_machines(tmp_path):
    root = machine(tmp_path, "", "1:name=systemd:/")
    assert host_memory.available_bytes(root) == (8 * GIB, "available host memory")


def test_a_group_of_version_2_counts_what_cannot_be_reclaimed(tmp_path):
    """Page cache makes room; anonymous and shared memory do not."""
    root = machine(tmp_path, V2_MOUNT, "0::/job/step0")
    cache = {"anon": GIB, "shmem": GIB, "inactive_file": GIB, "active_file": GIB // 2, "slab_reclaimable": GIB // 2}
    group(tmp_path / "sys/fs/cgroup/job/step0", 2, str(5 * GIB), 4 * GIB, **cache)
    left, source = host_memory.available_bytes(root)
    assert left == 3 * GIB
    assert source == "memory.max of the control group /sys/fs/cgroup/job/step0, less what it uses"


def test_a_parents_limit_counts_too(tmp_path):
    """Slurm limits the job, not the step."""
    root = machine(tmp_path, V2_MOUNT, "0::/job/step0")
    group(tmp_path / "sys/fs/cgroup/job/step0", 2, "max", 4 * GIB)
    group(tmp_path / "sys/fs/cgroup/job", 2, str(5 * GIB), 4 * GIB)
    assert host_memory.available_bytes(root) == (GIB, "memory.max of the control group /sys/fs/cgroup/job, less what it uses")


def test_no_limit_in_any_group_is_the_machines(tmp_path):
    root = machine(tmp_path, V2_MOUNT, "0::/job")
    group(tmp_path / "sys/fs/cgroup/job", 2, "max", 4 * GIB)
    assert host_memory.available_bytes(root)[1] == "available host memory"


def test_a_group_that_allows_more_than_the_machine_has_does_not_count(tmp_path):
    root = machine(tmp_path, V2_MOUNT, "0::/job")
    group(tmp_path / "sys/fs/cgroup/job", 2, str(100 * GIB), 0)
    assert host_memory.available_bytes(root) == (8 * GIB, "available host memory")


@pytest.mark.parametrize(
    ("top", "path", "folder"),
    [
        ("/", "/slurm/job_7", "slurm/job_7"),
        ("/docker/abc", "/docker/abc", ""),  # in a container: only its own part is mounted
        ("/docker/abc", "/docker/abc/step", "step"),
        ("/docker/abc", "/elsewhere", ""),
    ],
)
def test_a_group_of_version_1_is_found_wherever_it_is_mounted(tmp_path, top, path, folder):
    """"No limit" of version 1 is a very large number. Version 2 is mounted beside it, without the memory controller."""
    mounts = V1_MOUNT.format(top=top) + "\n41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    root = machine(tmp_path, mounts, f"4:cpuset,memory:{path}\n0::/")
    memory = tmp_path / "sys/fs/cgroup/memory"
    group(memory, 1, "9223372036854771712", 6 * GIB)
    group(memory / folder, 1, str(3 * GIB), 2 * GIB, total_inactive_file=GIB, inactive_file=0)
    left, source = host_memory.available_bytes(root)
    assert left == 2 * GIB
    assert source.startswith("memory.limit_in_bytes of the control group /sys/fs/cgroup/memory")


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path):
    root = machine(tmp_path, V2_MOUNT, "0::/job")
    group(tmp_path / "sys/fs/cgroup/job", 2, str(GIB), 2 * GIB)
    assert host_memory.available_bytes(root)[0] == 0


def test_a_refusal_names_the_group(tmp_path, monkeypatch):
    root = machine(tmp_path, V2_MOUNT, "0::/job")
    group(tmp_path / "sys/fs/cgroup/job", 2, str(GIB), GIB // 2)
    monkeypatch.setattr(slots, "available_bytes", lambda: host_memory.available_bytes(root))
    with pytest.raises(UsageError, match=r"has 536870912 \(memory.max of the control group /sys/fs/cgroup/job.*\): 1 bytes are missing"):
        slots.require_room(GIB // 2 + 1, None, "node7")
    with pytest.raises(UsageError, match=r"has 5 \(--hot-swap-host-memory-max-bytes\)"):
        slots.require_room(GIB // 2 + 1, 5, "node7")


def test_this_machine_has_an_answer():
    left, source = host_memory.available_bytes()
    assert left > 0 and source
