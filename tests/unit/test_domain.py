"""agent/domain.py: what fails together with a node."""

import pytest

from megatron.hotswap.agent.domain import failure_domain
from megatron.hotswap.errors import UsageError
from megatron.hotswap.host_list import expand_counts, expand_hosts


def test_a_node_is_its_own_domain():
    assert failure_domain("node", "n1") == ""


def test_the_leaf_switch_is_the_last_one_that_slurm_names(monkeypatch):
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.rack7.n1")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert failure_domain("switch", "n1") == "rack7"


@pytest.mark.parametrize(
    ("address", "pattern", "says"),
    [(None, None, "SLURM_TOPOLOGY_ADDR is not set"), ("n1", "node", "knows no switch above node n1")],
)
def test_a_cluster_without_switches_is_refused_in_words(monkeypatch, address, pattern, says):
    for name, value in (("SLURM_TOPOLOGY_ADDR", address), ("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        failure_domain("switch", "n1")


def test_a_file_of_nodes_or_of_switches(tmp_path):
    path = tmp_path / "domains"
    path.write_text("# racks\nn1 rackA\nn[2-3] rackB  # two\n\nSwitchName=s9 Nodes=m[01-03,10]\nSwitchName=root Switches=s9\n")
    found = {node: failure_domain(str(path), node) for node in ("n1", "n2", "n3", "m02", "m10")}
    assert found == {"n1": "rackA", "n2": "rackB", "n3": "rackB", "m02": "s9", "m10": "s9"}
    with pytest.raises(UsageError, match="does not say in which failure domain node m2 is"):
        failure_domain(str(path), "m2")


def test_a_line_that_says_nothing_is_named(tmp_path):
    path = tmp_path / "domains"
    path.write_text("n1 a\nn2\n")
    with pytest.raises(UsageError, match="line 2"):
        failure_domain(str(path), "n9")


def test_neither_a_word_nor_a_file():
    with pytest.raises(UsageError, match="must be node, switch or a readable file, got 'rack'"):
        failure_domain("rack", "n1")


def test_host_lists():
    assert expand_hosts("n[1-3,07],login,r[1-2]c[0-1]") == ["n1", "n2", "n3", "n07", "login", "r1c0", "r1c1", "r2c0", "r2c1"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
