"""tools/scaling: every point can be laid out, figures come out of what runs leave, whole or not, and mistakes are answered."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from megatron.hotswap.cli.sbatch import BatchJob
from megatron.hotswap.errors import UsageError
from megatron.hotswap.simulate import published

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from scaling import checks, commands, compare, machine, options, places, script, sites, standing, sweep, tables  # noqa: E402 - from the folders named above
from scaling.cli import app  # noqa: E402
from scaling.collect import collect  # noqa: E402
from scaling.points import OWN_CHOICE, SHAPES, SWEEPS, Point, points_of  # noqa: E402
from scaling.sweep import HOT_SWAP, PLAIN, Restart, Result, Settings, Sweep, lay_out, load  # noqa: E402

ALL = [point for points in SWEEPS.values() for point in points]
CPU = sites.SITES["cpu"]
SMALL = Settings(pairs=2, warm_up=2, steps=3, after=1)
RAN_ON = {"hardware": "4 x NVIDIA A100 (driver 1)", "software": "commit abc, torch 2"}
RESTART_PHASES = {"end_s": 1.0, "start_s": 20.0, "load_s": 4.0, "first_step_s": 5.25}
SWAP_PHASES = {"detect_s": 1.0, "halt_s": 0.5, "plan_s": 0.0, "rebuild_s": 2.0, "restore_s": 1.0, "first_step_s": 0.75}


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="python tools/scaling")


# ---- the points, and what is laid out


@pytest.mark.parametrize("point", ALL, ids=lambda p: f"{p.machine}-{p.name}")
def test_every_point_can_be_laid_out(point: Point, tmp_path: Path) -> None:
    """By plan's own functions: its grid divides, its batch does, it fits into host memory and the GPUs; bash reads its script."""
    site = sites.SITES[point.machine]
    found = checks.check(point, site)
    grid = found.plan.grid
    assert (grid.tensor, grid.pipeline, grid.data, grid.world_size) == (point.tensor, point.pipeline, point.data, point.gpus)
    assert found.plan.fits is not False and found.plan.hides is not False
    assert found.nodes * site.ranks_per_node == point.gpus
    path = tmp_path / "job.sbatch"
    path.write_text(script.batch_script(Sweep(tmp_path, False, site, Settings(), (point,)), found))
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert f"#SBATCH --nodes={found.nodes + 1}" in lines and "#SBATCH --no-kill" in lines and "#SBATCH --no-requeue" in lines
    assert lines[-1] == f"exec python tools/scaling run-point {tmp_path} {point.name}"


def test_the_sweeps_span_what_was_published_and_say_whose_choice_the_grids_are() -> None:
    gpus = {key: [point.gpus for point in points] for key, points in SWEEPS.items()}
    assert (min(gpus["perlmutter"]), max(gpus["perlmutter"]), max(gpus["vista"])) == (8, 512, 64)
    for key in ("perlmutter", "vista"):
        assert {point.model for point in SWEEPS[key]} == {"0.6B", "1.3B", "2.7B", "6.7B", "13B", "30B", "65B"}
    assert all(point.source == OWN_CHOICE for point in ALL)
    names = [(point.machine, point.name) for point in ALL]
    assert len(set(names)) == len(names)


def test_weak_scaling_keeps_a_gpus_work_within_half_and_twice_of_the_others() -> None:
    """Parameters x sequences a GPU. (Vista's last points of `weak` have 64 GPUs, however large the model.)"""
    for key, series in (("perlmutter", "weak"), ("perlmutter", "gpus"), ("vista", "gpus")):
        points = [point for point in SWEEPS[key] if series in point.series]
        work = [float(point.model.removesuffix("B")) * point.global_batch / point.gpus for point in points]
        assert max(work) <= 2 * min(work), (key, series, work)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor": 3}, "has 48 ranks, not 64"),
        ({"data": 8}, "has 32 ranks, not 64"),
        ({"zero_stage": 3}, "ZeRO stage 3: hot-swap covers 1"),
        ({"model": "7B"}, "a model is one of"),
        ({"source": "guess"}, "'published' or 'own choice', got 'guess'"),
        ({"global_batch": 500}, "--global-batch-size must be a multiple"),
        ({"gpus": 2, "tensor": 1, "data": 2}, "0.5 nodes; hot-swap takes two whole nodes"),
        ({"model": "65B"}, "GB of a GPU, more than 70% of its 40 GB"),
        ({"zero_stage": 0}, "of a node's host memory, which has 256"),
    ],
)
def test_a_point_that_cannot_run_is_refused(change: dict[str, Any], said: str) -> None:
    (point,) = points_of("perlmutter", ["6.7B-0064"])
    big = sites.SITES["perlmutter"]
    if change == {"zero_stage": 0}:  # the whole state on every rank is too much for the host even where the GPU would have room
        assert big.machine is not None
        big = replace(big, machine=replace(big.machine, device_memory_bytes=80e9))
    with pytest.raises(UsageError, match=said):
        checks.check(replace(point, **change), big)


def test_both_runs_of_a_pair_train_the_same(tmp_path: Path) -> None:
    (point,) = points_of("perlmutter", ["13B-0128"])
    site = sites.SITES["perlmutter"]
    hot = commands.hot_swap_command(point, site, 9)
    plain = commands.plain_command(point, site, 9, 8, tmp_path)
    assert hot[: len(hot) - 2] == plain[: len(plain) - 6]
    assert hot[-2:] == ["--hot-swap-interface", "hsn0"] and "--save" in plain[-6:]
    zero = commands.training_command(replace(point, zero_stage=0), site, 9)
    assert "--use-distributed-optimizer" in hot and "--use-distributed-optimizer" not in zero


def test_a_node_is_started_by_the_words_of_deadpool_sbatch() -> None:
    """The srun lines of both are the same, but for the output."""
    for key, extra in (("perlmutter", "--cpu-bind=none"), ("vista", "")):
        site = replace(sites.SITES[key], srun=extra)
        ranks = None if site.ask_for_gpus else 1
        text = BatchJob(["x.py"], 2, 1, 1, site.gpus_per_node, ranks, 1, "1", "x", 0, srun=site.srun).text()
        (line,) = re.findall(r"^    srun (.*?) \"\$\{output\[@\]\}\"", text.replace("\\\n", " "), re.MULTILINE)
        assert shlex.split(line.replace('"$node"', "n1")) == places.node_srun(site, "n1")[1:]


def example_layouts() -> list[tuple[str, str]]:
    """(the command that lays a sweep out, an example script) of examples that have one."""
    found = []
    for page in sorted((ROOT / "examples").glob("*/README.md")):
        blocks = [" ".join(block.split()) for block in page.read_text().split("```")[1::2]]
        layouts = [block for block in blocks if block.startswith("python tools/scaling layout ")]
        found += [(layouts[0], str(path.relative_to(ROOT))) for path in page.parent.glob("scaling-*.sbatch")]
    return found


@pytest.mark.parametrize(("command", "example"), example_layouts(), ids=lambda text: text.split("/")[-1])
def test_an_example_is_what_its_command_writes(command: str, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEADPOOL_WRITE_EXAMPLES=1 writes them anew."""
    monkeypatch.chdir(ROOT)
    words = command.split()[2:]
    point = Path(example).stem.removeprefix("scaling-")
    result = call(*words, "--only", point)
    assert result.exit_code == 0, result.output
    text = result.stdout.partition(f"# ==== {words[1]}/{point}/job.sbatch\n")[2].partition("\n\npoint ")[0].rstrip() + "\n"
    if os.environ.get("DEADPOOL_WRITE_EXAMPLES") == "1":
        (ROOT / example).write_text(text)
    assert text == (ROOT / example).read_text()


def test_every_command_of_the_examples_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeps that the pages tell to submit: laid out, dry."""
    monkeypatch.chdir(tmp_path)
    commands_told = []
    for page in [*(ROOT / "examples").glob("*/README.md"), ROOT / "tools/scaling/README.md"]:
        lines = [line.strip().partition(" #")[0] for line in page.read_text().splitlines()]
        commands_told += [line for line in lines if line.startswith("python tools/scaling sweep ")]
    assert len(commands_told) >= 6
    for line in commands_told:
        result = call("layout", *shlex.split(line)[3:], "--dry-run")
        assert result.exit_code == 0, (line, result.output, result.exception)
    assert not list(tmp_path.iterdir())


def test_a_time_limit_is_read_as_slurm_does() -> None:
    assert [script.hours_of(text) for text in ("90", "30:00", "01:30:00", "1-12", "1-12:30:00")] == [1.5, 0.5, 1.5, 36.0, 36.5]
    with pytest.raises(UsageError, match="as Slurm writes it"):
        script.hours_of("two hours")


# ---- the sweep's folder


def test_a_sweep_is_read_as_it_was_laid_out_and_can_only_grow(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    first, second = points_of("cpu")
    lay_out(folder, CPU, SMALL, (first,), True).save()
    assert load(folder) == lay_out(folder, CPU, SMALL, (first,), True)
    assert lay_out(folder, CPU, SMALL, (second,), True).points == (first, second)
    for other in ((replace(CPU, python="py"), SMALL, True), (CPU, Settings(), True), (CPU, SMALL, False)):
        with pytest.raises(UsageError, match="has a sweep of another"):
            lay_out(folder, *other[:2], (first,), other[2])
    patient = replace(CPU, time="2:00:00", directives=("--qos=x",))
    longer = lay_out(folder, patient, replace(SMALL, pairs=3, run_limit_s=9.0), (first,), True)
    assert (longer.site.time, longer.site.directives, longer.settings.pairs) == ("2:00:00", ("--qos=x",), 3)
    (folder / "sweep.json").write_text('{"version": 1')
    with pytest.raises(UsageError, match="not what a job writes"):
        load(folder)


def test_a_folder_is_the_same_one_wherever_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in the project's folder: a relative path would be another one there."""
    monkeypatch.chdir(tmp_path)
    lay_out(Path("mine"), CPU, SMALL, points_of("cpu"), True).save()
    found = load(Path("mine"))
    assert all(run.folder.is_relative_to(tmp_path) for point in found.points for run in found.runs(point))
    assert script.shown(ROOT / "runs/x") == Path("runs/x") and script.shown(Path("mine")) == tmp_path / "mine"


def test_who_is_first_alternates() -> None:
    laid_out = Sweep(Path("x"), True, CPU, replace(SMALL, pairs=3), points_of("cpu"))
    orders = [[run.kind for run in laid_out.runs(point) if run.first] for point in laid_out.points]
    assert orders == [[HOT_SWAP, PLAIN, HOT_SWAP], [PLAIN, HOT_SWAP, PLAIN]]
    assert all(len(list(laid_out.runs(point))) == 6 for point in laid_out.points)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("layout X", "--machine is missing: one of perlmutter, vista, cpu"),
        ("layout X --machine frontier", "--machine is one of perlmutter, vista, cpu; got frontier"),
        ("layout X --machine vista --local", "leave one of the two out"),
        ("layout X --machine vista --only 7B-0001", "this sweep has no point 7B-0001; it has 0.6B-0004"),
        ("layout X --local --pairs 0", "--pairs must be at least 1, got 0"),
        ("layout X --local --steps 2", "--steps must be at least 3, got 2"),
        ("layout X --local --megatron '--mtp-num-layers 1'", "does not know what --mtp-num-layers does"),
        ("layout X --machine cpu --time soon", "as Slurm writes it"),
        ("submit X", "X has no sweep .*lay one out: python tools/scaling layout FOLDER"),
        ("report X", "X has no sweep"),
        ("follow X", "X has no sweep"),
        ("run-point X y", "X has no sweep"),
    ],
)
def test_mistakes_are_answered(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*shlex.split(words))
    assert isinstance(result.exception, UsageError) and re.search(said, str(result.exception)), (result.output, result.exception)
    assert not list(tmp_path.iterdir())


def test_without_slurm_nothing_is_submitted_and_no_point_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("layout", str(tmp_path / "s"), "--machine", "cpu").exit_code == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert "sbatch is not found" in str(call("submit", str(tmp_path / "s")).exception)
    assert "run-point is for batch scripts" in str(call("run-point", str(tmp_path / "s"), "tiny-0002").exception)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    with pytest.raises(UsageError, match="job 7 has 2 nodes, and this point takes 2 and 1 spares"):
        places.Allocation(CPU, 2, 1)


def test_the_users_flags_take_the_place_of_the_machines() -> None:
    site = options.described(sites.SITES["perlmutter"], ["--mail-type=END"], ["module load x"], account="m1", qos="debug", interface="hsn1")
    assert site.directives == ("--constraint=gpu", "--account=m1", "--qos=debug", "--mail-type=END")
    assert (site.setup, site.interface) == (("module load x",), "hsn1")
    measured = options.speeds_of(site, 20.0, None, 5.0, 150.0)
    assert (measured.d2h, measured.checksum, measured.flops_per_gpu, measured.h2h) == (20e9, 5e9, 150e12, site.speeds().h2h)


# ---- what the runs leave behind


def write_hot_swap(run: sweep.Run, step_s: float = 0.5, stall_s: float = 0.005, steps: int = 7) -> None:
    """A run directory as a job writes it: steps.jsonl, summary.json and a worker's log."""
    logs = run.run_dir / "logs"
    logs.mkdir(parents=True)
    lines = [{"step": s, "step_s": step_s, "exposed_stall_s": stall_s, "loss": {}} for s in range(1, steps + 1)]
    (run.run_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recovery = {"kind": "swap", "nodes_lost": ["node1"], "phases": SWAP_PHASES, "total_s": sum(SWAP_PHASES.values()) - step_s}
    recovery |= {"normal_step_s": step_s, "steps_rerun": 0, "bytes_restored": 10}
    (run.run_dir / "summary.json").write_text(json.dumps({"exit_code": 0, "recoveries": [recovery]}))
    (logs / "node0-0.log").write_text(megatron_log(steps, step_s))
    (logs / "agent-node0.log").write_text(megatron_log(steps, 99.0))  # an agent's words are not the trainer's
    run.write(result_of(run, host_bytes=2_000_000))


def write_plain(run: sweep.Run, step_s: float = 0.4) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / "before.log").write_text(megatron_log(5, step_s))
    restart = Restart(RESTART_PHASES, sum(RESTART_PHASES.values()) - step_s, step_s)
    run.write(result_of(run, restart=restart))


def megatron_log(steps: int, step_s: float) -> str:
    line = " [2026-01-01 00:00:00] iteration {:8d}/      61 | consumed samples: 8 | elapsed time per iteration (ms): {:.1f} |\n"
    return "".join(line.format(step, 1e3 * step_s) for step in range(1, steps + 1))


def result_of(run: sweep.Run, ended: str = "done", reason: str = "", **more: Any) -> Result:
    return Result(ended=ended, reason=reason, began=1.0, took_s=2.0, first=run.first, nodes=["node0", "node1"], **RAN_ON, **more)


@pytest.fixture
def laid_out(tmp_path: Path) -> Sweep:
    """Two points of two pairs; nothing has been run."""
    made = lay_out(tmp_path / "sweep", CPU, SMALL, points_of("cpu"), True)
    made.save()
    return made


def runs_of(laid_out: Sweep, index: int = 0) -> dict[tuple[int, str], sweep.Run]:
    return {(run.pair, run.kind): run for run in laid_out.runs(laid_out.points[index])}


def test_figures_of_whole_runs(laid_out: Sweep) -> None:
    for (pair, kind), run in runs_of(laid_out).items():
        if kind == HOT_SWAP:
            write_hot_swap(run, 0.5 if pair == 1 else 0.42)
        else:
            write_plain(run)
    found, nothing = collect(laid_out)
    assert found.missing == [] and found.ratios == pytest.approx([1.25, 1.05])
    assert found.hot_swap[1].stall_s == pytest.approx(0.005) and found.hot_swap[1].stall_share == pytest.approx(0.01)
    assert found.host_bytes == 2_000_000
    assert [r.total_s for r in found.restarts] == pytest.approx([29.85, 29.85])
    assert compare.pairs_of_costs([found]) == [(pytest.approx((4.75 + 4.83) / 2), pytest.approx(29.85))]
    assert len(nothing.missing) == 4 and all("has not been run" in line for line in nothing.missing)
    # Half an interval and a restart over half a step and a swap.
    wanted = (29.85 + published.implied_interval(0.4) / 2) / ((4.75 + 4.83) / 2 + 0.2)
    assert compare.resume_times(found) == pytest.approx(wanted)
    assert laid_out.done(laid_out.points[0]) and not laid_out.done(laid_out.points[1])


def test_partial_and_damaged_runs_are_said_and_the_rest_is_used(laid_out: Sweep) -> None:
    first, second = runs_of(laid_out, 0), runs_of(laid_out, 1)
    write_hot_swap(first[1, HOT_SWAP])
    write_plain(first[1, PLAIN])
    write_hot_swap(first[2, HOT_SWAP], steps=4)  # one of three measured steps is not there
    first[2, PLAIN].folder.mkdir(parents=True)
    (first[2, PLAIN].folder / "before.log").write_text(megatron_log(2, 0.4))  # under way
    write_hot_swap(second[1, HOT_SWAP])
    with (second[1, HOT_SWAP].run_dir / "steps.jsonl").open("a") as file:
        file.write('{"step": 8, "step_')
    second[1, PLAIN].folder.mkdir(parents=True)
    second[1, PLAIN].write(result_of(second[1, PLAIN], "failed", "it was ended after 5 s"))
    write_hot_swap(second[2, HOT_SWAP])
    (second[2, HOT_SWAP].run_dir / "summary.json").write_text("{")
    second[2, PLAIN].folder.mkdir(parents=True)
    (second[2, PLAIN].folder / "result.json").write_text('{"ended": "do')  # cut off while it was written
    one, two = collect(laid_out)
    assert list(one.hot_swap) == [1] and list(one.plain) == [1] and not two.hot_swap and not two.plain
    said = dict(line.split(": ", 1) for line in (*one.missing, *two.missing))
    assert "has 2 of the 3 measured steps" in said["tiny-0002/pair-2/hot-swap"]
    assert said["tiny-0002/pair-2/plain"] == "is not over; it has come to step 2"
    assert "steps.jsonl line 8 is not the record of a step" in said["small-0004/pair-1/hot-swap"]
    assert said["small-0004/pair-1/plain"] == "failed: it was ended after 5 s"
    assert "summary.json is not what a job writes" in said["small-0004/pair-2/hot-swap"]
    assert "is not over" in said["small-0004/pair-2/plain"]


def test_a_run_in_which_no_node_was_lost_gives_no_figures(laid_out: Sweep) -> None:
    run = runs_of(laid_out)[1, HOT_SWAP]
    write_hot_swap(run)
    (run.run_dir / "summary.json").write_text('{"exit_code": 0, "recoveries": []}')
    assert any("summary.json has 0 recoveries" in line for line in collect(laid_out)[0].missing)


def test_the_report_of_a_part_shows_it_and_says_what_is_missing(laid_out: Sweep) -> None:
    runs = runs_of(laid_out)
    write_hot_swap(runs[1, HOT_SWAP])
    write_plain(runs[1, PLAIN])
    result = call("report", str(laid_out.folder))
    assert result.exit_code == 1, result.output
    report = (laid_out.folder / "report.md").read_text()
    assert "says nothing about GPUs" in report and "own choice" in report
    assert re.search(r"\| tiny-0002 +\| 2 .*\| 0\.4 +\| 0\.5 +\| 1\.2500 ", report), report
    assert "29.8 to 32.6 s   | 4.75 s" in report and "6.3 times" in report
    assert "- small-0004/pair-2/plain: has not been run" in report
    assert "- 4 x NVIDIA A100 (driver 1); commit abc, torch 2" in report
    for name in ("steps.png", "recovery.png", "memory.png"):
        assert (laid_out.folder / name).read_bytes().startswith(b"\x89PNG")
    figures = json.loads((laid_out.folder / "figures.json").read_text())
    assert figures["points"][0]["plain"]["1"]["restart"]["phases"] == RESTART_PHASES
    assert figures["published"][0]["low"] == published.SWAP.low


def test_a_report_of_nothing_is_a_report(laid_out: Sweep) -> None:
    assert call("report", str(laid_out.folder)).exit_code == 1
    assert not (laid_out.folder / "recovery.png").exists()


def test_only_pairs_within_the_published_range_stand_beside_the_published_overhead(tmp_path: Path) -> None:
    points = points_of("perlmutter", ["0.6B-0008", "6.7B-0064"])
    made = lay_out(tmp_path / "sweep", sites.SITES["perlmutter"], SMALL, points, False)
    for index, step_s in ((0, 0.8), (1, 0.404)):
        write_hot_swap(runs_of(made, index)[1, HOT_SWAP], step_s)
        write_plain(runs_of(made, index)[1, PLAIN])
    ours = {row.what: row.ours for row in compare.rows(collect(made))}
    assert ours[published.OVERHEAD.name] == "+1.00%"
    text = tables.text(made, collect(made), checks.check_all(points, made.site))
    assert "CPUs" not in text and published.SOURCE in text


def test_where_a_point_stands(laid_out: Sweep) -> None:
    (tiny, small), runs = laid_out.points, runs_of(laid_out)
    for run in runs.values():
        (write_hot_swap if run.kind == HOT_SWAP else write_plain)(run)
    second = runs_of(laid_out, 1)
    second[1, PLAIN].folder.mkdir(parents=True)
    second[1, PLAIN].write(result_of(second[1, PLAIN], "failed", "out of\nmemory"))
    (second[1, HOT_SWAP].run_dir / "logs").mkdir(parents=True)
    (second[1, HOT_SWAP].run_dir / "steps.jsonl").write_text('{"step": 3}\n{"step": 4')
    assert standing.of_point(laid_out, tiny, {}, False).state == "done"
    idle, running = standing.of_point(laid_out, small, {}, False), standing.of_point(laid_out, small, {}, True)
    assert (idle.state, idle.runs, idle.live) == ("failed", "0/4", False)
    assert running.live and running.detail == "pair-1/plain failed: out of memory; pair-1/hot-swap: step 3"
    clustered = replace(laid_out, local=False)
    assert standing.of_point(clustered, small, {}, False).state == "failed"
    (clustered.folder_of(small) / "submitted.json").write_text('{"job": "17", "t": 1.0}')
    queued = standing.of_point(clustered, small, {"17": "PENDING (Priority)"}, False)
    assert (queued.state, queued.detail, queued.live) == ("queued", "job 17: PENDING (Priority)", True)
    assert standing.of_point(clustered, small, {"17": "RUNNING (None)"}, False).state == "running"
    unheard = standing.of_point(clustered, small, None, False)
    assert (unheard.state, unheard.live) == ("not known", True)
    second[1, PLAIN].clear()
    gone = standing.of_point(clustered, small, {}, False)
    assert gone.state == "ended" and "slurm-17.out" in gone.detail and not gone.live


def test_only_one_process_makes_the_runs_of_a_point(laid_out: Sweep) -> None:
    tiny, small = laid_out.points
    assert not laid_out.is_running(tiny)
    with laid_out.running(tiny):
        assert laid_out.is_running(tiny) and not laid_out.is_running(small)
        assert standing.of_point(laid_out, tiny, {}, False).live
        result = call("run-point", str(laid_out.folder), tiny.name)
        assert "another process makes the runs of this point" in str(result.exception)
    assert not laid_out.is_running(tiny) and not (laid_out.folder_of(tiny) / "pair-1").exists()


def test_a_killed_job_is_over_when_nothing_of_it_runs(tmp_path: Path) -> None:
    """Not when init has waited for it: a restart would be charged with that."""
    job = places._Tree(places._popen(["bash", "-c", "sleep 600 & sleep 600 & wait"], tmp_path / "log"))
    root = psutil.Process(job._process.pid)
    while len(root.children()) < 2:
        time.sleep(0.01)
    family = [root, *root.children()]
    began = time.time()
    ordered = job.kill()
    assert began <= ordered < time.time() < ordered + 1.0
    assert not any(map(places._lives, family)) and job.code() == -9
    assert job.kill() > ordered and job.code() == -9


def test_what_a_run_was_made_on_is_said() -> None:
    assert re.search(r"\d+ cores of .+, [\d.]+ GiB$", machine.hardware_here())
    assert re.match(r"commit \w+.*, python 3\.\d+.*, torch \d", machine.software_here())


def test_every_shape_divides_its_heads() -> None:
    assert all(shape.hidden % shape.heads == 0 for shape in SHAPES.values())
