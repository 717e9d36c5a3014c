"""`--on-failure restart`: what is refused before training, what steps.jsonl says of steps that ran again, and that any order of losses
ends in training or in words. The decisions themselves are told in scenarios/restart_*.txt."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
from story import Story

from megatron.hotswap.cli.launch import Launch, control_of
from megatron.hotswap.cli.restarts import check_restart, describe_restart
from megatron.hotswap.control import messages as m
from megatron.hotswap.control.phases import Phase
from megatron.hotswap.coordinator.recorder import Recorder
from megatron.hotswap.coordinator.service import Scheduled
from megatron.hotswap.errors import UsageError
from megatron.hotswap.patches.plain import load_newest

ROOT = Path(__file__).resolve().parents[2]
#: Far more events than a job of these sizes can take; a loop that reaches it has not ended.
EVENTS_MAX = 400


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "has no --save: give --save DIR and --save-interval N"),
        ("--save {d}", "--save-interval is None: give --save-interval N"),
        ("--save {d} --save-interval 0", "at least 1 step, and --save-interval is 0"),
        ("--save {d} --save-interval 5 --no-save-optim", "with --no-save-optim the optimizer's state would begin anew: leave"),
        ("--save {d} --save-interval 5 --no-save-rng", "with --no-save-rng the random generators"),
        ("--save {d} --save-interval 5 --async-save", "with --async-save a checkpoint would be said to be there before it is"),
        ("--save {d} --save-interval five", "--save-interval/--persistent-save-interval: invalid int value: 'five'"),
    ],
)
def test_a_job_that_could_not_restart_is_refused_before_it_starts(flags: str, says: str, tmp_path: Path) -> None:
    argv = flags.format(d=tmp_path / "ck").split()
    with pytest.raises(UsageError, match=says):
        check_restart(argv)
    launch = Launch(2, 1, 0, str(ROOT / "pretrain_gpt.py"), argv, tmp_path / "run", on_failure="restart")
    with pytest.raises(UsageError, match=says):
        control_of(launch, "run")
    assert control_of(Launch(2, 1, 0, launch.script, [], tmp_path / "run"), "run").on_failure == "swap"


def test_a_checkpoint_of_another_run_is_not_taken_for_the_jobs_own(tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "5"]
    check_restart(argv)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    with pytest.raises(UsageError, match=r"has one of step 40 that this job does not begin from \(--load is None\): give --load"):
        check_restart(argv)
    check_restart([*argv, "--load", f"{tmp_path}/../{tmp_path.name}"])
    assert "every 5 steps" in describe_restart(argv)[0]


def test_faults_that_could_not_strike_are_refused(tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "5"]
    check_restart(argv, [Scheduled("kill", "node", 1, 8, "save")])
    for phase in ("fence", "d2h", "h2h"):
        with pytest.raises(UsageError, match=rf"phase {phase} \(step 8\) cannot strike.*choose forward"):
            check_restart(argv, [Scheduled("kill", "node", 1, 8, phase)])
    with pytest.raises(UsageError, match="--separate-networks is for hot swap"):
        check_restart(argv, separate_networks=True)


def test_an_injection_into_a_phase_of_hot_swap_is_refused_in_words() -> None:
    story = Story()
    story.play("job on_failure=restart\nup node0 node1 node2\n")
    refused = story.control.handle("", m.Inject(m.Injection("kill", "node", "node0", 0, 9, "fence")), 1.0)
    assert [d.kind for d in refused] == ["inject-refused"] and "fence is hot swap's" in refused[0].reason


def test_a_later_life_loads_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    def args() -> Namespace:
        return Namespace(save=str(tmp_path), load="elsewhere", ckpt_step=3, finetune=True, no_load_optim=True, no_load_rng=True)

    before = args()
    load_newest(before)
    assert before == args()  # nothing is saved yet: it begins as the first one did
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    load_newest(before)
    whole = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
    assert before == Namespace(save=str(tmp_path), load=str(tmp_path), ckpt_step=None, **whole)


def _record(step: int, version: int, loss: float) -> m.StepRecord:
    return m.StepRecord(step, version, 8 * step, 0.5, 0.0, {"lm loss": loss.hex()}, None)


def test_steps_that_ran_again_are_marked_and_compared(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3, 4):
        recorder.step(_record(step, 1, 4.0 / step))
    recorder.committed(2)
    recorder.rolled_back(2, 2)
    recorder.step(_record(3, 2, 4.0 / 3))
    recorder.rolled_back(2, 2)  # what another rank says of the same restart, late, takes nothing away
    recorder.rolled_back(2, 3)
    recorder.step(_record(3, 3, 4.0 / 3))
    recorder.step(_record(4, 3, 0.75))
    recorder.step(_record(5, 3, 0.5))
    recorder.close(0, "training is done")
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert all(("first_t" in x) == (x["again"] > 0) and x.get("first_t", x["t"]) <= x["t"] for x in lines)
    said = [(x["step"], x["again"], x.get("same_bits")) for x in lines]
    assert said == [(1, 0, None), (2, 0, None), (3, 2, True), (4, 1, False), (5, 0, None)]


def _one_event(story: Story, chance: random.Random) -> None:
    """Something happens: time passes, a node or a worker is lost or comes back, or what is under way gets further."""
    control = story.control
    alive = [a for a in control.agents.values() if not a.leaving]
    what = chance.random()
    if what < 0.1 and alive:
        story.do_closed(chance.choice(alive).node)
    elif what < 0.2 and (running := [(a, w) for a in alive for w in a.ready]):
        agent, worker = chance.choice(running)
        story.do_worker_lost(agent.node, "killed by SIGSEGV", str(worker))
    elif what < 0.35:
        gone = [n for n in ("node0", "node1", "node2", "node3") if n not in {a.node for a in control.agents.values()}]
        if gone:
            story.do_join(gone[0], life=str(chance.random()))
    elif what < 0.7 and (down := [(a, w) for a in alive for w in range(a.join.workers) if w not in a.ready]):
        agent, worker = chance.choice(down)
        story.lives[agent.node] = agent.incarnation
        story.do_up_again(agent.node, str(worker))
    elif control.phase is Phase.RESUMING and control.membership is not None and control.recovery is not None:
        missing = [str(r) for r in range(4) if r not in control.recovery.restored]
        story.do_restored(*missing[:1], checkpoint=str(max(control.committed, 0)))
    elif control.phase is Phase.TRAINING:
        story.do_stepped(str(control.newest_step + 1), "3")
        story.do_first_step("0", "1", "2", "3")
        if chance.random() < 0.3:
            story.do_acknowledged(str(control.newest_step), "0", "1", "2", "3")
    story.do_time(str(story.now + 0.25))


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_losses_ends_in_training_or_in_words(seed: int) -> None:
    """Nobody is left behind: once losses stop and nodes come, the job trains within a bounded number of events, or it has ended and says
    why. Meanwhile versions only grow, and who trains has read one checkpoint."""
    chance, story = random.Random(seed), Story()
    story.play("job per_node=2 spares=2 on_failure=restart failures=1000 window=0.1\nup node0 node1 node2 node3\n")
    control, version = story.control, 0
    for _ in range(EVENTS_MAX):
        if control.exit_code is not None:
            break
        _one_event(story, chance)
        assert control.version >= version
        version = control.version
        if control.phase is Phase.TRAINING and control.recovery is not None:
            assert {x.generation for x in control.recovery.restored.values()} == {control.recovery.generation}
    for _ in range(EVENTS_MAX):
        if control.exit_code is not None or control.phase is Phase.TRAINING:
            break
        calm = random.Random(seed)
        calm.random = lambda: chance.uniform(0.3, 1.0)  # type: ignore[method-assign]
        _one_event(story, calm)
    if control.exit_code is None:
        assert control.phase is Phase.TRAINING
    else:
        assert control.exit_code in (1, 75) and control.exit_reason
