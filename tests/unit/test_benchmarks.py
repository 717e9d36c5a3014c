"""benchmarks/run.py: what a figure, a threshold and a failure come to."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import run  # noqa: E402

AT_LEAST, EXACTLY = {"min": 0.85, "what": "a ratio"}, {"min": 1.0, "max": 1.0}


@pytest.mark.parametrize(
    ("printed", "threshold", "verdict"),
    [
        (0.85, AT_LEAST, "ok"),
        (0.849, AT_LEAST, "FALLS SHORT"),
        ({"value": 0.9, "note": "3 GB/s"}, AT_LEAST, "ok"),
        ({"value": None, "note": "no GPU"}, {"max": 0}, "not run"),
        ({"value": 0.2, "condition": "copying takes 70 % of the step"}, {"max": 0.01}, "condition not met"),
        (1.0, EXACTLY, "ok"),
        (1.001, EXACTLY, "FALLS SHORT"),
        (1.3, None, ""),
    ],
)
def test_verdicts(printed, threshold, verdict):
    assert run.figure("name", printed, threshold).verdict == verdict


@pytest.mark.parametrize("printed", [[1, 2], {"rank": 1}, "text", True])
def test_what_is_no_figure_is_detail(printed):
    assert run.figure("name", printed, None) is None


def test_thresholds_are_said_in_words():
    assert run.Line("x", 1.0, AT_LEAST).wanted == "at least 0.85"
    assert run.Line("x", 1.0, {"max": 3}).wanted == "at most 3"
    assert run.Line("x", 1.0, EXACTLY).wanted == "1"


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A suite of one program, to be written by the test."""
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "SUITES", {"tiny": ("program.py",)})
    (tmp_path / "thresholds.json").write_text(json.dumps({"tiny": {"speed": {"min": 2, "unit": "GB/s", "what": "how fast"}}}))

    def measure(program: str) -> tuple[bool, dict, str]:
        (tmp_path / "program.py").write_text(program)
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        good = run.measure("tiny", console)
        return good, json.loads((tmp_path / "results/tiny.json").read_text()), console.export_text()

    return measure


def test_a_good_figure_is_shown_and_kept_with_machine_and_date(suite):
    good, kept, shown = suite('print("warming up"); print(\'{"speed": {"value": 2.5, "note": "of 3"}, "all": [2, 3]}\')')
    assert good
    assert kept["figures"]["speed"] == {
        "value": 2.5,
        "threshold": {"min": 2, "unit": "GB/s", "what": "how fast"},
        "verdict": "ok",
        "note": "of 3",
    }
    assert kept["details"] == {"program.py": {"all": [2, 3]}} and kept["failures"] == []
    assert kept["hardware"]["cores"] > 0 and kept["hardware"]["memory_gib"] > 0 and kept["hardware"]["cpu"]
    assert re.match(r"\d{4}-\d\d-\d\dT", kept["date"]) and kept["commit"]
    assert "2.5 GB/s" in shown and "at least 2 GB/s" in shown


def test_a_figure_that_falls_short_fails_the_suite(suite):
    good, kept, shown = suite("print('{\"speed\": 1.5}')")
    assert not good and kept["figures"]["speed"]["verdict"] == "FALLS SHORT" and "falls short: speed" in shown


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('{}')", "no program printed the figure 'speed'"),
        ("print('{\"speed\": 3}'); raise SystemExit(3)", "program.py ended with exit code 3"),
        ("print('fast')", "no figures"),
        ("", "no figures"),
    ],
)
def test_a_figure_that_is_missing_fails_the_suite(suite, program, says):
    good, kept, _ = suite(program)
    assert not good and says in kept["failures"][0]


def test_every_suite_has_thresholds_and_every_threshold_says_what_it_is_of():
    thresholds = json.loads((ROOT / "benchmarks/thresholds.json").read_text())
    assert thresholds.keys() == run.SUITES.keys()
    for figures in thresholds.values():
        for name, threshold in figures.items():
            assert threshold.keys() & {"min", "max"} and threshold["what"], name
