"""`deadpool simulate` as a user calls it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron.hotswap.cli.main import app
from megatron.hotswap.cli.simulate import read_inputs, simulate
from megatron.hotswap.errors import UsageError
from megatron.hotswap.simulate.inputs import HOUR_S, Inputs

ROOT = Path(__file__).resolve().parents[2]
QUICK = "--seeds 3 --no-sensitivity"


def call(words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words.split()])


def answer(words: str) -> dict[str, Any]:
    result = call(f"{words} --json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def run_dir(at: Path, **summary: Any) -> Path:
    at.mkdir()
    (at / "summary.json").write_text(json.dumps(summary))
    return at


def test_every_input_has_a_flag_and_no_flag_is_lost() -> None:
    flags = {name.replace("_mtbf_h", "_mtbf_s").replace("repair_h", "repair_s") for name in inspect.signature(simulate).parameters}
    others = {"from_run", "spares_for", "seeds", "seed", "sensitivity", "plot", "paper", "as_json"}
    assert flags - others == {field.name for field in fields(Inputs)}


def test_json_has_every_scheme_with_its_accounts_and_intervals() -> None:
    found = answer(f"{QUICK} --nodes 64 --spares 8 --node-mtbf-h 2000")
    names = [s["name"] for s in found["schemes"]]
    assert names[0] == "checkpoint-restart" and names[-1] == "hot swap" and len(set(names)) == 6
    for scheme in found["schemes"]:
        assert len(scheme["outcomes"]) == 3
        assert scheme["goodput"]["low"] <= scheme["goodput"]["mean"] <= scheme["goodput"]["high"] <= 1.1
    by_name = {s["name"]: s for s in found["schemes"]}
    assert by_name["hot swap"]["goodput_per_allocated_node"]["mean"] == pytest.approx(by_name["hot swap"]["goodput"]["mean"] * 64 / 72)
    assert by_name["exclude-and-run"]["goodput_per_allocated_node"] == by_name["exclude-and-run"]["goodput"]
    assert found["inputs"]["nodes"] == {"value": 64, "origin": "given"}
    assert found["inputs"]["node_mtbf_s"] == {"value": 2000 * HOUR_S, "origin": "given"}
    assert found["inputs"]["save_s"]["origin"] == "assumed"
    assert found["inputs"]["swap_s"]["origin"].startswith("published: ")
    assert found["interval"]["as_good_s"][0] <= found["interval"]["best_s"] <= found["interval"]["as_good_s"][1]
    assert found["sensitivity"] == []


def test_costs_come_from_a_run_and_flags_win(tmp_path: Path) -> None:
    """The demo's own summary, as kept in benchmarks/, and what an older or shorter one leaves out stays as it was."""
    demo = json.loads((ROOT / "benchmarks" / "demo.json").read_text())["summary"]
    demo |= {"mean_step_s": 0.7, "copy": {"d2h_s": 0.01, "h2h_s": 0.02, "total_s": 0.03, "generations": 50}}
    inputs, origins = read_inputs({"nodes": 8, "commit_s": None, "restart_s": 25.0}, run_dir(tmp_path / "a", **demo))
    assert (inputs.nodes, inputs.restart_s, origins["restart_s"]) == (8, 25.0, "given")
    assert (inputs.swap_s, inputs.step_s, inputs.commit_s) == (0.736165, 0.7, 0.03)
    assert inputs.stall_s == pytest.approx(7.513935217384694e-05 * 0.7)
    assert origins["swap_s"].startswith("measured: mean of 1 swap (") and origins["repair_s"] == "assumed"
    short, origins = read_inputs({}, run_dir(tmp_path / "b", recoveries=[], mean_step_s=2.0))
    assert (short.step_s, short.swap_s, origins["swap_s"].split(":")[0]) == (2.0, Inputs().swap_s, "published")


def test_only_swaps_count_as_swaps(tmp_path: Path) -> None:
    recoveries = [{"kind": "swap", "total_s": 1.0}, {"kind": "respawn", "total_s": 50.0}, {"kind": "swap", "total_s": 3.0}]
    inputs, origins = read_inputs({}, run_dir(tmp_path / "run", recoveries=recoveries))
    assert inputs.swap_s == 2.0 and "mean of 2 swaps, 1 to 3 s" in origins["swap_s"]


def test_a_run_without_anything_to_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recovery, no restart_baseline_s and no step"):
        read_inputs({}, run_dir(tmp_path / "empty", recoveries=[]))
    with pytest.raises(UsageError, match="cannot be read"):
        read_inputs({}, tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "summary.json").write_text('{"recoveries": [')
    with pytest.raises(UsageError, match="is not what a job writes"):
        read_inputs({}, broken)


def test_words_say_what_is_assumed_and_what_to_do() -> None:
    result = call(f"{QUICK} --nodes 64 --group-share 0.1 --spares-for 0.001")
    words = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert "of these inputs are assumed" in words and "group_nodes" in words
    assert "For at most 0.10%:" in words and "Young" in words and "Daly" in words


def test_without_failures_there_is_nothing_to_advise() -> None:
    result = call(f"{QUICK} --node-mtbf-h inf --save-s 0")
    assert result.exit_code == 0, result.output
    assert "Failures: none." in result.output and "nothing lost" in result.output and "Spares:" not in result.output


def test_jobs_that_never_end_are_said_to() -> None:
    result = call("--seeds 2 --no-sensitivity --nodes 64 --node-mtbf-h 2 --repair-h 0 --steps 2000 --interval-s 5000 --restart-s 2000")
    assert result.exit_code == 0, result.output
    assert "2 of 2 jobs were given up after 20 times" in " ".join(result.output.split())


def test_the_sensitivity_names_each_input_and_its_origin() -> None:
    found = answer("--seeds 2 --nodes 16 --swap-s 20")
    by_name = {s["name"]: s for s in found["sensitivity"]}
    assert {"node_mtbf_s", "restart_s", "swap_s", "save_s", "interval_s", "repair_s", "spares", "stall_s", "group_share"} <= set(by_name)
    assert (by_name["swap_s"]["low"], by_name["swap_s"]["high"], by_name["swap_s"]["origin"]) == (10.0, 40.0, "given")


def test_the_published_figures_stand_beside_the_simulated_ones() -> None:
    found = json.loads(call("--paper --json --seeds 5").stdout)
    assert {f["low"] for f in found["published"]} >= {29.8, 150.0, 3.7, 0.053, 18.8}
    assert all("arXiv:2607.01646" in f["source"] for f in found["published"])
    assert [row["step_s"] for row in found["reproduced"]] == [1.0, 5.0, 10.0, 20.0]
    result = call("--paper --seeds 5")
    assert "Not known: the failure rate, the checkpoint interval and the step time" in " ".join(result.output.split())


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    result = call(f"{QUICK} --nodes 16 --plot {path}")
    assert result.exit_code == 0, result.output
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seeds 0", "--seeds must lie between 1 and 10000, got 0"),
        ("--nodes 0", "nodes must be at least 1"),
        ("--nodes 1", "at least two nodes"),
        ("--spares-for 2", "between 0 and 1, got 2.0"),
        (f"{QUICK} --plot /nonexistent/picture.png", "cannot be drawn"),
        (f"{QUICK} --plot picture.nonsense", "cannot be drawn"),
    ],
)
def test_mistakes_are_answered_in_words(words: str, says: str) -> None:
    result = call(words)
    assert isinstance(result.exception, UsageError) and says in str(result.exception)


def test_another_process_gives_the_same_bits() -> None:
    """The order of Python's sets and hashes must not matter."""
    command = [sys.executable, "-m", "megatron.hotswap.cli.main", "simulate", *QUICK.split(), "--node-mtbf-h", "500", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.run(command, cwd=ROOT, env={**env, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and '"interruptions"' in runs[0]


@pytest.mark.parametrize(("mark", "words"), [("output", ""), ("paper", "--paper")])
def test_docs_show_what_the_command_says(mark: str, words: str) -> None:
    """docs/simulate.md has the command's own output, between two markers."""
    text = (ROOT / "docs" / "simulate.md").read_text().split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]
    shown = [line.rstrip() for line in text.strip().removeprefix("```").removesuffix("```").strip().splitlines()]
    said = [line.rstrip() for line in call(words).output.strip().splitlines()]
    assert shown == said, f"put the output of `deadpool simulate {words}` between the markers anew"
