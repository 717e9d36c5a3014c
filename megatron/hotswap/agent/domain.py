"""What fails together with a node: nothing but itself, its leaf switch, or what a file says (`--hot-swap-failure-domain`)."""

from __future__ import annotations

import re
from pathlib import Path

from .. import environment
from ..errors import UsageError
from ..host_list import expand_hosts


def failure_domain(wanted: str, node: str, host: str = "") -> str:
    """The node's failure domain; empty for the node itself.

    Args:
        wanted: "node", "switch" or a path.
        node: its name, as the job has it.
        host: the machine's, where that is another: there are several of the job's nodes on it, which fail together.

    Raises:
        UsageError: Slurm does not tell the switch, or the file does not name the node.
    """
    if wanted == "node":
        return host
    return _leaf_switch(host or node) if wanted == "switch" else _from_file(Path(wanted), host or node)


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
