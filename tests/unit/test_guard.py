"""A Megatron that the patches were not written for is refused, with the reason."""

from __future__ import annotations

import importlib.metadata

import pytest

from megatron.hotswap.errors import UsageError
from megatron.hotswap.patches import guard


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(UsageError, match=r"hot-swap patches megatron-core 0\.19\.2.*0\.20\.0 is installed"):
        guard.require_known_megatron()


def test_a_changed_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = "json:dumps"
    monkeypatch.setattr(guard, "KNOWN", {changed: "0" * 16})
    with pytest.raises(UsageError, match=r"json:dumps is not the code that the patches were written for"):
        guard.require_known_megatron()


def test_a_function_that_is_gone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KNOWN", {"json:no_such_function": "0" * 16})
    with pytest.raises(UsageError, match="json:no_such_function"):
        guard.require_known_megatron()


def test_the_installed_megatron_is_known() -> None:
    """The table in guard.py is that of the pinned wheel; importing the trainer needs the CPU layer where there is no GPU."""
    import subprocess
    import sys

    program = (
        "from megatron.hotswap.device import cpu\n"
        "if cpu.needed(): cpu.install()\n"
        "from megatron.hotswap.patches import guard\n"
        "guard.require_known_megatron()\n"
        "assert len(guard.KNOWN) > 20\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
