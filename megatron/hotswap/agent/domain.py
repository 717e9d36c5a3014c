"""What fails together with a node: nothing but itself, its leaf switch, or what a file says (`--hot-swap-failure-domain`)."""

from __future__ import annotations

import re
from pathlib import Path

from .. import environment
from ..errors import UsageError


def failure_domain(wanted: str, node: str) -> str:
    """The node's failure domain; empty for the node itself.

    Args:
        wanted: "node", "switch" or a path.
        node: its name.

    Raises:
        UsageError: Slurm does not tell the switch, or the file does not name the node.
    """
    if wanted == "node":
        return ""
    return _leaf_switch(node) if wanted == "switch" else _from_file(Path(wanted), node)


def _leaf_switch(node: str) -> str:
    told = environment.slurm_topology()
    if told is None:
        raise UsageError(
            f"--hot-swap-failure-domain switch needs Slurm to tell node {node} its switch, and SLURM_TOPOLOGY_ADDR is not set: start "
            "the job by srun on a cluster with topology/tree, or give a file with lines of 'NODE SWITCH'"
        )
    names, kinds = (part.split(".") for part in told)
    switches = [name for name, kind in zip(names, kinds, strict=False) if kind == "switch"]
    if not switches:
        raise UsageError(
            f"--hot-swap-failure-domain switch: Slurm knows no switch above node {node} (SLURM_TOPOLOGY_ADDR is {told[0]!r}, its pattern "
            f"{told[1]!r}); give a file with lines of 'NODE SWITCH'"
        )
    return switches[-1]


def _from_file(path: Path, node: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError as failure:
        raise UsageError(f"--hot-swap-failure-domain must be node, switch or a readable file, got {str(path)!r}: {failure}") from failure
    for number, raw in enumerate(lines, 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if fields:  # Slurm's topology.conf; switches of switches name no nodes
            if node in expand_hosts(fields.get("Nodes", "")):
                return fields["SwitchName"]
        elif len(line.split()) != 2:
            raise UsageError(f"{path}, line {number}: a line is 'NODE DOMAIN' or 'SwitchName=… Nodes=…', got {raw!r}")
        elif node in expand_hosts(line.split()[0]):
            return line.split()[1]
    raise UsageError(f"{path} does not say in which failure domain node {node} is; add a line '{node} DOMAIN'")


def expand_hosts(text: str) -> set[str]:
    """Slurm's host lists: "n[1-3,07],login" -> {"n1", "n2", "n3", "n07", "login"}."""
    hosts = set()
    for part in re.findall(r"(?:[^,\[\]]+|\[[^\]]*\])+", text):
        found = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part):
            found = [before + after for before in found for after in _numbers(piece)]
        hosts.update(found)
    return hosts


def _numbers(piece: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    result = []
    for span in piece[1:-1].split(","):
        first, _, last = span.partition("-")
        result += [f"{i:0{len(first)}d}" for i in range(int(first), int(last or first) + 1)]
    return result
