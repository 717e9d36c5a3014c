"""`deadpool plan` as a user calls it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron.hotswap.cli.main import app
from megatron.hotswap.cli.plan_flags import read_training_flags
from megatron.hotswap.errors import UsageError

MODEL = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --max-position-embeddings 2048 --micro-batch-size 1 "
    "--global-batch-size 64 --padded-vocab-size 50304 --bf16 --use-distributed-optimizer"
)


def call(words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words.split()])


def plan(words: str, model: str = MODEL) -> dict[str, Any]:
    result = call(f"{words} --json -- {model}")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_json_has_every_rank_and_node() -> None:
    answer = plan("--nodes 4 --ranks-per-node 2 --d2h-gb-per-s 20 --h2h-gb-per-s 10 --step-s 2")
    assert [rank["rank"] for rank in answer["ranks"]] == list(range(8))
    assert len(answer["node_host_memory_bytes"]) == 4
    assert sum(rank["owned"] for rank in answer["ranks"]) == answer["parameters"]
    assert answer["hides"] is True and answer["speeds_measured_here"] == []


def test_hot_swaps_own_flags_are_read_from_the_command() -> None:
    words = "--nodes 4 --d2h-gb-per-s 20 --h2h-gb-per-s 1 --step-s 1 --nodes-per-switch 2"
    flags = "--hot-swap-replicas 2 --hot-swap-interval 4 --hot-swap-failure-domain switch --hot-swap-when-late skip"
    one, more = plan(words), plan(words, f"{MODEL} {flags}")
    assert sum(more["node_host_memory_bytes"]) * 4 == sum(one["node_host_memory_bytes"]) * 6
    assert (more["interval"], more["skip_when_late"], more["losses"]["switches_survived"]) == (4, True, 2)
    assert more["losses"]["nodes"]["nodes"] == 2
    assert plan(words, f"{MODEL} --hot-swap-host-memory-max-bytes 1000")["fits"] is False


def test_the_step_can_be_estimated() -> None:
    answer = plan("--nodes 8 --tflops-per-gpu 100")
    assert answer["times_s"]["step_is_estimate"] is True
    # 6 x parameters x tokens, and attention: within a fifth of the rule of thumb.
    assert answer["times_s"]["step"] == pytest.approx(6 * 1.3e9 * 64 * 2048 / 8 / 100e12, rel=0.2)


def test_words_say_what_is_not_known_and_what_would_do() -> None:
    result = call(f"--nodes 4 --step-s 1 -- {MODEL}")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "give --d2h-gb-per-s, or --measure" in words and "GB/s of H2H would do" in words


def test_words_say_what_to_change() -> None:
    result = call(f"--nodes 4 --step-s 0.5 --d2h-gb-per-s 20 --h2h-gb-per-s 4 --host-memory-gb 10 -- {MODEL}")
    assert "no: each step waits" in result.output and "does not fit" in result.output
    assert "What to change" in result.output and "times the data-parallel ranks" in result.output


def test_measured_speeds_fill_what_was_not_given() -> None:
    """For real: the engine's queue, its checksum and a TCP connection; no bound but that they are speeds."""
    answer = plan("--nodes 4 --step-s 1 --d2h-gb-per-s 20 --measure")
    assert answer["speeds"]["d2h"] == 20e9
    assert answer["speeds_measured_here"] == ["checksum", "h2h"]
    assert answer["speeds"]["h2h"] > 1e6 and answer["speeds"]["checksum"] > 1e6


def test_the_table_says_that_nothing_was_measured() -> None:
    result = call("--paper")
    assert result.exit_code == 0
    assert "H2H that would do" in result.output and "…" not in result.output.split("Computed")[0]  # in a pipe of 80 columns too
    assert "Computed, not measured" in result.output and "data-sheet figures" in result.output and "our own choice" in result.output
    assert len(json.loads(call("--paper --json").stdout)["rows"]) == 14


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 4", "give the training command"),
        (f"-- {MODEL}", "--nodes is missing"),
        (f"--nodes 3 -- {MODEL} --tensor-model-parallel-size 2", "not a multiple of tensor"),
        (f"--nodes 3 -- {MODEL}", "--global-batch-size must be a multiple"),
        (f"--nodes 1 -- {MODEL}", "at least two nodes"),
        (f"--nodes 4 -- {MODEL} --hot-swap-failure-domain my-nodes.txt", "node and switch, got 'my-nodes.txt'"),
    ],
)
def test_mistakes_are_answered(words: str, said: str) -> None:
    result = call(words)
    assert isinstance(result.exception, UsageError) and said in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mtp-num-layers 1", "does not know what --mtp-num-layers does"),
        ("--optimizer muon", "knows --optimizer adam, sgd, got muon"),
        ("--optimizer sgd", "goes with --optimizer adam only"),
        ("--num-distributed-optimizer-instances 2", "does not cover"),
        ("--num-layers x", "cannot be read"),
        ("--num-experts 4 --moe-layer-freq [1]*23", "a 0 or 1 for each of 24 layers"),
        ("--num-experts 4 --moe-layer-freq __import__('os')", "must be a list of 0 and 1"),
    ],
)
def test_flags_that_cannot_be_planned_are_refused(flags: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[").replace("*", r"\*")):
        read_training_flags([*MODEL.split()[1:], *flags.split()], None, False)


def test_the_vocabulary_is_the_tokenizers() -> None:
    base = MODEL.replace("--padded-vocab-size 50304 ", "").split()[1:]
    with pytest.raises(UsageError, match="give it before --, as --vocabulary"):
        read_training_flags(base, None, False)
    assert read_training_flags(base, 50257, False).shape.vocabulary == 50304
    null = [*base, "--tokenizer-type=NullTokenizer", "--vocab-size=1000", "--tensor-model-parallel-size=2"]
    assert read_training_flags(null, None, False).shape.vocabulary == 1024
