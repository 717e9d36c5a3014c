"""The rules of the code that a program can check (design, section 7; style guide, 12 and 18)."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron" / "hotswap"
FILE_LINES_MAX = 500
#: The device layer is one file on purpose: whoever asks what differs without a GPU has one place to read.
LONG_FILES = {"megatron/hotswap/device/cpu.py"}
FUNCTION_LINES_MAX = 70
#: "path:function" of functions that may be longer. Empty, and meant to stay so: split the function instead.
LONG_FUNCTIONS: set[str] = set()

#: What a part may import of megatron.hotswap: itself and these. A part is a folder or a file; the longest match counts.
#: Imports point down, so a part names only what stands above it in this table (and `LATER` says which do not yet).
LAYERS: dict[str, set[str]] = {
    "": set(),  # the package itself: a docstring
    "errors": set(),
    "config": {"errors"},
    "long_work": set(),
    "codec": {"errors"},
    "security": {"errors"},
    "environment": {"errors"},
    "processes": set(),
    "host_list": set(),
    "records": {"errors"},
    "metrics": {"errors"},
    "topology/grid": {"errors"},
    "snapshot/layout": {"errors"},
    "replication/placement": {"errors", "topology/grid"},
    "recovery/plan": {"errors"},
    "sizing": {"errors", "replication/placement", "snapshot/layout", "topology/grid"},
    "simulate": {"errors", "replication/placement", "topology/grid"},
    "snapshot/manifest": {"errors", "snapshot/layout"},
    "control": {"codec", "errors", "recovery/plan", "replication/placement", "snapshot/manifest", "topology/grid"},
    "snapshot/host_memory": set(),
    "snapshot/slots": {"errors", "snapshot/layout", "snapshot/host_memory"},
    "snapshot/durable": {"errors", "snapshot/layout", "snapshot/manifest", "snapshot/slots"},
    "snapshot/engine": {"errors", "snapshot/layout", "snapshot/slots"},
    "replication": {"codec", "errors", "processes", "security/tls", "snapshot/layout", "snapshot/slots"},
    "replication/transports": {"config", "replication", "security"},
    "topology/ledger": set(),
    "topology/sockets": set(),
    "topology/rendezvous": set(),
    "topology/process_group": {"errors", "topology/rendezvous", "topology/sockets"},
    "topology/rebind": {"errors"},
    "topology/groups": {"errors", "topology"},
    "coordinator": {"codec", "control", "errors", "metrics", "records", "security", "agent/inject"},
    "agent/local": {"codec", "control", "errors", "snapshot/slots"},
    "agent/inject": {"control"},
    "agent/scratch": set(),
    "agent": {
        "agent/local",
        "agent/inject",
        "agent/scratch",
        "config",
        "control",
        "coordinator/stores",
        "coordinator/wire",
        "environment",
        "errors",
        "host_list",
        "metrics",
        "processes",
        "replication",
        "security",
        "snapshot/durable",
        "snapshot/layout",
        "snapshot/manifest",
        "snapshot/slots",
    },
    "worker": {
        "agent/local",
        "control",
        "environment",
        "errors",
        "long_work",
        "processes",
        "snapshot/slots",
        "topology",
        "recovery/execute",
        "patches",
        "config",
        "device",
    },
    "recovery/execute": {"agent/local", "control", "errors", "snapshot", "topology", "worker/abort", "worker/session"},
    "patches": {"agent/local", "config", "control", "errors", "recovery", "snapshot", "topology", "worker", "environment", "device"},
    "device": {"errors"},
    "recovery": set(),
    "snapshot": set(),
    "topology": set(),
    "cli": {
        "config",
        "control",
        "device",
        "coordinator",
        "environment",
        "errors",
        "metrics",
        "records",
        "topology/grid",
        "agent/inject",
        "agent/scratch",
        "recovery/plan",
        "replication/transports",
        "security",
        "simulate",
        "sizing",
        "slurm/layout",
        "snapshot/durable",
        "snapshot/manifest",
    },
    "slurm": {
        *("agent", "cli", "config", "control", "coordinator", "environment", "errors", "host_list", "processes", "records"),
        *("replication/transports", "security", "slurm/layout"),
    },
    "slurm/layout": {"environment", "errors", "host_list"},
    "__main__": {"agent", "config", "environment", "errors", "cli", "device", "patches", "processes", "slurm", "worker"},
}
PURE = (
    *("control", "recovery/plan", "replication/placement", "simulate", "sizing", "snapshot/layout", "snapshot/manifest", "topology/grid"),
    "topology/ledger",
)
IMPURE_MODULES = {"torch", "socket", "threading", "time", "random", "asyncio", "os", "subprocess", "multiprocessing", "datetime", "secrets"}
MYPY_STRICT = [
    "megatron/hotswap/control",
    "megatron/hotswap/recovery/plan.py",
    "megatron/hotswap/replication/placement.py",
    "megatron/hotswap/simulate",
    "megatron/hotswap/sizing",
    "megatron/hotswap/snapshot/layout.py",
    "megatron/hotswap/snapshot/manifest.py",
    "megatron/hotswap/topology/grid.py",
    "megatron/hotswap/topology/ledger.py",
]

#: Every flag of hot-swap. A flag is a promise to users: to add one, add it here and to README.md, and say in the commit why no
#: derived value would do; to take one away or rename it, keep the old name working for a release.
FLAGS = {
    "--hot-swap",
    "--hot-swap-run-dir",
    "--hot-swap-lease-s",
    "--hot-swap-heartbeat-interval-s",
    "--hot-swap-collective-timeout-s",
    "--hot-swap-halt-timeout-s",
    "--hot-swap-long-work-s",
    "--hot-swap-resume-timeout-s",
    "--hot-swap-wait-for-spare-s",
    "--hot-swap-respawn-timeout-s",
    "--hot-swap-respawn-window-s",
    "--hot-swap-quarantine-failures",
    "--hot-swap-quarantine-window-s",
    "--hot-swap-health-command",
    "--hot-swap-health-interval-s",
    "--hot-swap-health-timeout-s",
    "--hot-swap-coordinator-timeout-s",
    "--hot-swap-hang-factor",
    "--hot-swap-hang-min-s",
    "--hot-swap-replicas",
    "--hot-swap-failure-domain",
    "--hot-swap-interval",
    "--hot-swap-keep-durable",
    "--hot-swap-when-late",
    "--hot-swap-rebuild",
    "--hot-swap-check-groups",
    "--hot-swap-host-memory-max-bytes",
    "--hot-swap-interface",
    "--hot-swap-transport",
    "--hot-swap-encrypt",
    "--hot-swap-store",
    "--hot-swap-spares",
    "--hot-swap-ranks-per-node",
    "--hot-swap-metrics-port",
    "--hot-swap-metrics-address",
    "--hot-swap-on-failure",
}


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """ "control/state" for megatron/hotswap/control/state.py; a package's __init__ is the package."""
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return name.removesuffix("__init__").removesuffix("/")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute name) of everything that a file imports, inside functions too; "a.b.c" for `from a.b import c`."""
    tree = ast.parse(path.read_text())
    package = ["megatron", "hotswap", *path.relative_to(PACKAGE).parts[:-1]] if PACKAGE in path.parents else []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{full}.{alias.name}") for alias in node.names]
    return found


def part_of(module: str) -> str | None:
    """The entry of LAYERS that a module of ours belongs to."""
    matches = [part for part in LAYERS if module == part or (part and module.startswith(part + "/"))]
    return max(matches, key=len, default=None)


def allowed(part: str, target: str) -> bool:
    if part_of(target) == part:
        return True
    return any(target == to or target.startswith(to + "/") for to in LAYERS[part])


def ours(name: str) -> str | None:
    """ "control/messages" for "megatron.hotswap.control.messages.Join"; None for what is not ours."""
    if not name.startswith("megatron.hotswap."):
        return None
    parts = name.split(".")[2:]
    while parts:
        at = PACKAGE.joinpath(*parts)
        if at.with_suffix(".py").is_file() or at.is_dir():
            return "/".join(parts)
        parts.pop()
    return None


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_down(path):
    """The design's code map: who may know whom."""
    module = module_of(path)
    part = part_of(module)
    assert part is not None, f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}, under what it may import"
    wrong = [f"line {line}: {name}" for line, name in imports(path) if (target := ours(name)) and not allowed(part, target)]
    assert not wrong, f"{part} may import only {sorted(LAYERS[part])}: {wrong}"


@pytest.mark.parametrize("path", [p for p in sources() if (part_of(module_of(p)) in PURE)], ids=module_of)
def test_pure_packages_are_pure(path):
    """No clock, no chance, no I/O: time is a parameter, results are values; so the simulator runs the real thing."""
    wrong = [f"line {line}: {name}" for line, name in imports(path) if name.split(".")[0] in IMPURE_MODULES]
    assert not wrong


def test_only_patches_and_device_name_megatron():
    wrong = [
        f"{module_of(path)} line {line}: {name}"
        for path in sources()
        for line, name in imports(path)
        if name.startswith(("megatron.core", "megatron.training")) and not module_of(path).startswith(("patches", "device"))
    ]
    assert not wrong


def test_the_agent_imports_no_torch():
    """Agents are small and start in milliseconds: in a fresh process, their modules bring in neither torch nor Megatron."""
    code = (
        "import sys, megatron.hotswap.agent.main, megatron.hotswap.coordinator.service; "
        "print([m for m in ('torch', 'megatron.core', 'megatron.training', 'cryptography') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_the_agent_imports_no_communication_library():
    """MPI and its kind abort when a peer dies: only side processes may load them, whatever transport was chosen."""
    code = (
        "import sys, megatron.hotswap.agent.main; from megatron.hotswap.replication import mpi, nixl; "
        "print([m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'nixl', 'nixl_cu12', 'nixl_cu13')])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_the_set_of_flags_is_frozen():
    from megatron.hotswap import config

    parser = config.add_arguments(argparse.ArgumentParser(add_help=False))
    assert {option for action in parser._actions for option in action.option_strings} == FLAGS


def test_every_flag_has_a_help_text():
    from megatron.hotswap import config

    assert all(action.help for action in config.add_arguments(argparse.ArgumentParser(add_help=False))._actions)


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in tracked("*.py", "*.cpp", "*.h", "*.cu")}
    long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX and name not in LONG_FILES}
    assert not long, f"at most {FILE_LINES_MAX} lines a file; split {long}"


def functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in ast.walk(tree) if isinstance(n, kinds)]


def test_functions_are_short():
    long = {f"{p.relative_to(ROOT)}:{name}" for p in tracked("*.py") for name, n in functions(p) if n > FUNCTION_LINES_MAX}
    assert long == LONG_FUNCTIONS, f"at most {FUNCTION_LINES_MAX} lines a function"


def text_files() -> list[Path]:
    binary = (".png", ".bin", ".idx", ".so", ".gz", ".ico")
    return [p for p in tracked() if p.suffix not in binary and p != Path(__file__).resolve()]


def lines_with(pattern: str) -> list[str]:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_nothing_is_left_to_do():
    """What is open is an issue, not a remark in the code."""
    assert not lines_with(r"\b(TODO|FIXME|XXX)\b")


def test_no_file_knows_the_machine_it_was_written_on():
    """No home or work folder, no registry or proxy host: a clone must work elsewhere."""
    assert not lines_with(r"(?<![\w.])/(home|root|work|Users)/\w")
    assert not lines_with(r"(?i)(index-url|extra-index|artifactory|nexus\.|registry\.npmjs|pypi\.(?!org)\w)")


def test_docs_show_the_phases_of_the_table():
    """docs/architecture.md has the diagram that control/phases.py makes, between two markers."""
    from megatron.hotswap.control.phases import diagram

    shown = (ROOT / "docs" / "architecture.md").read_text().split("<!-- transitions -->")[1].split("<!-- /transitions -->")[0].strip()
    assert shown == diagram(), "write it anew: python -c 'from megatron.hotswap.control.phases import diagram; print(diagram())'"


def test_ruff():
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_mypy_strict_on_the_pure_packages():
    run = subprocess.run([sys.executable, "-m", "mypy", "--strict", *MYPY_STRICT], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
