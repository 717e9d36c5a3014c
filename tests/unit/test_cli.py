"""The `deadpool` command: what it accepts, what it says."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from megatron.hotswap.cli import faults, narrate
from megatron.hotswap.cli.main import main
from megatron.hotswap.cli.progress import Progress
from megatron.hotswap.cli.show import Show, last_traceback, log_of_failure
from megatron.hotswap.control.messages import Injection, Member, Membership, StepRecord
from megatron.hotswap.control.state import Log, Phase
from megatron.hotswap.coordinator.wire import Status
from megatron.hotswap.errors import UsageError


def test_the_command_imports_no_torch_no_megatron_core_and_no_matplotlib():
    code = (
        "import sys, megatron.hotswap.cli.main, megatron.hotswap.cli.run_job, megatron.hotswap.cli.client, "
        "megatron.hotswap.cli.verify, megatron.hotswap.device.cpu\n"
        "print([m for m in ('torch', 'megatron.core', 'megatron.training', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run_deadpool(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["deadpool", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


def test_no_job_in_the_directory_is_said_in_words(tmp_path, monkeypatch, capsys):
    for command in (["status"], ["inject", "--kill", "node:node1"]):
        code, said = run_deadpool(monkeypatch, capsys, *command, "--run-dir", tmp_path)
        assert code == 2
        assert f"no job runs in {tmp_path}" in said
    (tmp_path / "job.json").write_text('{"coordinator": "127.0.0.1:1", "run_id": "r", "pid": 999999999}')
    code, said = run_deadpool(monkeypatch, capsys, "status", "--run-dir", tmp_path)
    assert (code, "no job runs" in said) == (2, True)


def test_a_usage_error_of_run_has_exit_code_2_and_starts_nothing(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    nodes = ["run", "--nodes", 2, "--ranks-per-node", 2, "--run-dir", run_dir]
    code, said = run_deadpool(monkeypatch, capsys, *nodes, "--", tmp_path / "no.py")
    assert (code, "is not a file" in said, run_dir.exists()) == (2, True, False)
    code, said = run_deadpool(monkeypatch, capsys, *nodes, "--inject", "kill:node:9:9", "--", "no.py")
    assert (code, "there is no rank 9" in said) == (2, True)


# ---- faults


def test_targets_of_inject():
    assert faults.parse_target("kill", "node:node1", None, None) == Injection("kill", "node", "node1")
    assert faults.parse_target("freeze", "worker:n-2/3", 12, "save") == Injection(
        "freeze", "worker", "n-2", 3, 12, "save"
    )
    for target in ("node1", "worker:node1", "node:", "rank:3", "agent:node1/0"):
        with pytest.raises(UsageError, match="takes node:NAME"):
            faults.parse_target("kill", target, None, None)
    assert faults.parse_target("segv", "worker:node1/0", 12, None) == Injection("segv", "worker", "node1", 0, 12)
    with pytest.raises(UsageError, match="--fault segv takes worker:NAME/INDEX"):
        faults.parse_target("segv", "node:node1", None, None)
    with pytest.raises(UsageError, match="--fault takes one of exit, segv, oom, hang, spin, fail-collective"):
        faults.parse_target("explode", "worker:node1/0", None, None)
    with pytest.raises(UsageError, match="give --at-step"):
        faults.parse_target("kill", "node:node1", None, "forward")
    with pytest.raises(UsageError, match="a phase is one of forward, backward"):
        faults.parse_target("kill", "node:node1", 3, "sideways")


def test_scheduled_faults():
    fault = faults.parse_scheduled("kill:node:2:14:backward", 4)
    assert (fault.action, fault.scope, fault.rank, fault.at_step, fault.phase) == ("kill", "node", 2, 14, "backward")
    assert faults.parse_scheduled("freeze:worker:0:5", 4).phase == "forward"
    assert faults.parse_scheduled("fail-collective:worker:1:9:backward", 4).action == "fail-collective"
    for spec, words in (
        ("segv:node:2:9", "--inject takes"),
        ("kill:node:2", "--inject takes"),
        ("kill:node:4:9", "no rank 4"),
        ("kill:node:0:1", "from step 3 on, got 1"),
        ("kill:node:0:9:sideways", "a phase is one of"),
    ):
        with pytest.raises(UsageError, match=words):
            faults.parse_scheduled(spec, 4)


def test_a_fault_that_could_not_strike_is_refused():
    status = Status(True, "", step=10, nodes={"node0": [0, 1], "node1": [2, 3]}, spares=["node2"])
    faults.check_against(status, Injection("kill", "node", "node1", at_step=11))
    for injection, words in (
        (Injection("kill", "node", "node7"), "it has node0, node1, node2"),
        (Injection("kill", "worker", "node1", 2), "has workers 0 to 1"),
        (Injection("kill", "node", "node1", at_step=10), "has completed step 10"),
        (Injection("kill", "node", "node2", at_step=20), "is a spare"),
        (Injection("segv", "worker", "node2"), "is a spare, whose training threads wait"),
    ):
        with pytest.raises(UsageError, match=words):
            faults.check_against(status, injection)


# ---- words

RECOVERY = {
    "kind": "swap",
    "nodes_lost": ["node1"],
    "ranks_respawned": [],
    "phases": {"detect_s": 0.1, "halt_s": 0.2, "plan_s": 0.0, "rebuild_s": 0.5, "restore_s": 0.25, "first_step_s": 0.4},
    "total_s": 1.15,
    "normal_step_s": 0.3,
    "steps_rerun": 1,
    "bytes_restored": 2_500_000,
}


def test_the_time_line_names_every_phase():
    assert narrate.time_line(RECOVERY) == (
        "recovered from the loss of node1 in 1.15 s: detect 0.10 + halt 0.20 + plan 0.00 + rebuild 0.50 + "
        "restore 0.25 + first step 0.40 - a normal step 0.30; 2.5 MB restored, 1 completed step ran again"
    )


def test_what_was_lost_in_words():
    assert narrate.what_was_lost(RECOVERY) == "the loss of node1"
    respawn = {**RECOVERY, "nodes_lost": [], "ranks_respawned": [2]}
    assert narrate.what_was_lost(respawn) == "the loss of the process of rank 2"
    assert narrate.what_was_lost({**RECOVERY, "ranks_respawned": [0, 2]}) == "the loss of node1 and the processes of ranks 0, 2"
    assert narrate.what_was_lost({**respawn, "ranks_respawned": []}) == "a broken collective"


def test_decisions_in_words():
    lost = Log("node-lost", "node1: its connection closed", {"node": "node1", "spare": False})
    assert narrate.narrate(lost) == "node lost: node1: its connection closed"
    assert narrate.narrate(Log("assign", "", {"node": "node2", "ranks": [2, 3]})) == "spare node2 takes ranks 2, 3"
    plan = narrate.narrate(Log("plan", "", {"generation": 13, "fetch": [2, 3]}))
    assert plan.startswith("going on from step 13, the newest that every rank still has; ranks 2, 3 fetched")
    assert narrate.narrate(Log("ignored", "late")) is None
    assert narrate.narrate(Log("end", "training is done", {"code": 0})) == "the job is over: training is done"
    assert narrate.narrate(Log("end", "rank 0 failed", {"code": 1})) is None  # said once, after the job


def membership():
    members = tuple(Member(f"node{r // 2}", f"node{r // 2}-abcd1234", r % 2, "127.0.0.1:1") for r in range(4))
    return Membership(1, members, ((2,), (3,), (0,), (1,)))


def test_who_holds_whose_replica():
    assert narrate.placement_lines(membership()) == [
        "node0: ranks 0, 1; holds the replicas of ranks 2, 3",
        "node1: ranks 2, 3; holds the replicas of ranks 0, 1",
    ]


def record(step, seconds=0.5):
    return StepRecord(step, 1, 8 * step, seconds, seconds / 100, {"lm loss": (3.25).hex()}, None, 1000)


def test_the_progress_line():
    assert Progress("gathering", 0, -1, None, 60).line() == "no step yet | gathering"
    assert Progress("training", 2, 11, record(12), 60).line() == (
        "step 12/60 | loss 3.2500 | 2,000 tokens/s | membership 2 | committed 11 | stall 1.00 % | training"
    )


class FakeRecorder:
    recoveries = [RECOVERY]  # noqa: RUF012 - a constant
    last_step = record(14)


class FakeControl:
    phase, version, committed, exit_code, exit_reason = Phase.TRAINING, 2, 13, None, ""
    membership = membership()


class FakeCoordinator:
    control, recorder = FakeControl(), FakeRecorder()
    notices = [Log("start", "4 ranks", {}), Log("recovered", "swap complete", {})]  # noqa: RUF012


def test_the_display_without_a_terminal(tmp_path):
    now = [0.0]
    out = io.StringIO()
    coordinator = FakeCoordinator()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/node0-abcd1234-0.log").write_text("training ...\n")
    with Show(tmp_path, Console(file=out, width=200), steps_total=60, clock=lambda: now[0]) as show:
        show(coordinator)
        now[0] = 6.0
        show(coordinator)
    lines = out.getvalue().splitlines()
    assert lines[0] == "training ..."
    assert "training starts: 4 ranks" in lines[1]
    assert "node1: ranks 2, 3" in lines[3]
    assert "recovered from the loss of node1 in 1.15 s" in lines[4]
    assert lines[5].startswith("step 14/60 | loss 3.2500")
    assert len(lines) == 6


def test_the_log_of_a_failure(tmp_path):
    coordinator = FakeCoordinator()
    coordinator.control.failed = None
    assert log_of_failure(coordinator.control.failed, tmp_path) == tmp_path / "logs"
    coordinator.control.failed = ("node1-abcd1234", 1)
    early = log_of_failure(coordinator.control.failed, tmp_path)
    assert early == tmp_path / "logs/node1-abcd1234-1.log"
    (tmp_path / "logs").mkdir()
    early.write_text('x\nTraceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: x\n')
    assert last_traceback(early) == ['  File "a.py", line 1, in f', "    g()", "ValueError: x"]
    assert last_traceback(tmp_path / "logs") == []
