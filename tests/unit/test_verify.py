"""`deadpool verify`: bit for bit, the first difference in words, and the exit codes."""

import json

import pytest

from megatron.hotswap.cli import verify
from megatron.hotswap.cli.main import main
from megatron.hotswap.errors import UsageError


def write_run(folder, steps, summary=True):
    folder.mkdir()
    lines = [
        json.dumps({"step": n, "loss_hex": {"lm loss": loss}, "grad_norm_hex": norm, "consumed_samples": samples})
        for n, loss, norm, samples in steps
    ]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps({"steps": len(steps), "bit_identical": None}))
    return folder


STEPS = [(1, "0x1.8p+2", "0x1.0p+0", 8), (2, "0x1.7p+2", "0x1.1p+0", 16), (3, "0x1.6p+2", "0x1.2p+0", 24)]


def run_deadpool(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["deadpool", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


def test_equal_runs_exit_with_0_and_say_so_in_the_summary(tmp_path, monkeypatch, capsys):
    a, b = write_run(tmp_path / "a", STEPS), write_run(tmp_path / "b", STEPS)
    code, said = run_deadpool(monkeypatch, capsys, "verify", a, b)
    assert code == 0
    assert "bit-identical: 3 steps" in said
    assert json.loads((b / "summary.json").read_text()) == {"steps": 3, "bit_identical": True}
    assert json.loads((a / "summary.json").read_text())["bit_identical"] is None


def test_one_last_bit_is_a_difference(tmp_path, monkeypatch, capsys):
    a = write_run(tmp_path / "a", STEPS)
    b = write_run(tmp_path / "b", [STEPS[0], (2, "0x1.7000000000001p+2", "0x1.1p+0", 16), STEPS[2]])
    code, said = run_deadpool(monkeypatch, capsys, "verify", a, b)
    assert code == 1
    assert "step 2: the lm loss differs: 0x1.7p+2 (5.75) in run A, 0x1.7000000000001p+2" in said
    assert json.loads((b / "summary.json").read_text())["bit_identical"] is False


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ((2, "0x1.7p+2", "0x1.3p+0", 16), "step 2: the gradient norm differs"),
        ((2, "0x1.7p+2", None, 16), "in run A, none in run B"),
        ((2, "0x1.7p+2", "0x1.1p+0", 17), "step 2: the consumed samples differ: 16 in run A, 17 in run B"),
    ],
)
def test_the_difference_is_named(tmp_path, changed, words):
    a, b = write_run(tmp_path / "a", STEPS), write_run(tmp_path / "b", [STEPS[0], changed, STEPS[2]])
    assert words in verify.verify_runs(a, b).difference


def test_a_run_that_ends_early_is_not_the_same(tmp_path):
    a, b = write_run(tmp_path / "a", STEPS), write_run(tmp_path / "b", STEPS[:2])
    found = verify.verify_runs(a, b)
    assert found.compared == 2
    assert found.difference == "step 3 is in run A only: run B has steps 1 to 2"


def test_common_steps_compare_a_run_that_began_at_a_checkpoint(tmp_path):
    a, b = write_run(tmp_path / "a", STEPS), write_run(tmp_path / "b", STEPS[1:])
    assert not verify.verify_runs(a, b).identical
    assert verify.verify_runs(a, b, common_only=True) == verify.Comparison(2, None)
    nothing = write_run(tmp_path / "c", [(9, "0x1p+0", None, 72)])
    assert "no step is in both" in verify.verify_runs(a, nothing, common_only=True).difference


def test_nan_equals_itself(tmp_path):
    steps = [(1, "nan", "nan", 8)]
    assert verify.verify_runs(write_run(tmp_path / "a", steps), write_run(tmp_path / "b", steps)).identical


def test_unreadable_runs_exit_with_2_in_words(tmp_path, monkeypatch, capsys):
    good = write_run(tmp_path / "good", STEPS)
    damaged = write_run(tmp_path / "damaged", STEPS)
    (damaged / "steps.jsonl").write_text('{"step": 1, "loss_hex"')
    empty = write_run(tmp_path / "empty", [])
    (empty / "steps.jsonl").write_text("")
    for other, words in ((tmp_path / "nope", "cannot be read"), (damaged, "line 1"), (empty, "has no step")):
        code, said = run_deadpool(monkeypatch, capsys, "verify", good, other)
        assert code == 2
        assert words in said
        assert "Traceback" not in said


def test_a_job_that_still_runs_has_no_summary_to_write_to(tmp_path):
    a, b = write_run(tmp_path / "a", STEPS), write_run(tmp_path / "b", STEPS, summary=False)
    with pytest.raises(UsageError, match="is it still running"):
        verify.verify_runs(a, b)
