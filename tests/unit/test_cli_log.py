"""Megatron's log is shown once, whichever ranks write it, and noise stays in the files."""

import os
import threading

from megatron.hotswap.cli import output
from megatron.hotswap.cli.log_filter import LogFilter
from megatron.hotswap.cli.log_tail import LogTail
from megatron.hotswap.cli.output import JobConsole


def shown(lines, verbose=False):
    """What is shown of [(file, line), …]."""
    one = LogFilter(verbose)
    return [text for source, line in lines if (text := one.take(source, line)) is not None]


def of(source, text):
    return [(source, line) for line in text.splitlines()]


ITERATION = (
    " [2026-11-29 14:20:{:02d}.641189] iteration       {:2d}/      30 | consumed samples:   8 | lm loss: 5.5E+00 |"
)


def test_a_step_is_shown_once_though_survivor_and_spare_both_log_it():
    lines = [("a", ITERATION.format(10, 4)), ("b", ITERATION.format(55, 4)), ("b", ITERATION.format(56, 5))]
    assert shown(lines) == [ITERATION.format(10, 4), ITERATION.format(56, 5)]


def test_a_warning_is_shown_once_for_all_ranks():
    warning = "WARNING:megatron.core.somewhere:the disk is slow"
    assert shown([("a", warning), ("b", warning), ("c", warning)]) == [warning]


def test_equal_text_but_for_times_and_the_rank_is_the_same():
    lines = [
        ("a", "time to initialize megatron (seconds): 10.926"),
        ("b", "time to initialize megatron (seconds): 3.1"),
    ]
    assert shown(lines) == [lines[0][1]]
    lines = [("a", "[Rank 0] the data is short"), ("b", "[Rank 1] the data is short")]
    assert shown(lines) == [lines[0][1]]


def test_validation_results_differ_by_their_numbers():
    first = " validation loss at iteration 10 | lm loss value: 5.234228E+00 | "
    second = " validation loss at iteration 20 | lm loss value: 5.068231E+00 | "
    assert shown([("a", "-" * 90), ("a", first), ("a", first), ("a", second)]) == [first.rstrip(), second.rstrip()]


NOISE = """\
/v/lib/python3.12/site-packages/megatron/core/optimizer/__init__.py:25: UserWarning: Apex is not installed.
  warnings.warn(
WARNING: one_logger package is required to enable e2e metrics tracking.
------------------------ arguments ------------------------
  num_layers ...................................... 2
  transformer_impl ................................ local
-------------------- end of arguments ---------------------
INFO:megatron.core.timers:(min, max) time across ranks (ms):
    evaluate .......................................: (80.02, 85.78)
INFO:megatron.core.distributed.param_and_grad_buffer:Number of buckets for gradient all-reduce / reduce-scatter: 1
Params for bucket 1 (18080 elements, 18560 padded size, 0 param(s) with extra main_grads):
\tdecoder.final_layernorm.bias (param.main_grad.dtype=torch.float32)
[rank1]:[W1129 14:20:48.123 socket.cpp:755] could not connect
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
RuntimeError: Connection closed by peer

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "y.py", line 1, in <module>
RuntimeError: gloo
> building train, validation, and test datasets ...
 > datasets target sizes (minimum size):
    train:      240
"""


def test_noise_stays_in_the_files():
    assert shown(of("a", NOISE)) == [
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        "    train:      240",
    ]


def test_blocks_of_two_files_do_not_mix():
    lines = [
        ("a", "---- arguments ----"),
        ("b", "training ..."),
        ("a", "  lr ... 1"),
        ("a", "---- end of arguments ----"),
    ]
    assert shown(lines) == ["training ..."]


def test_verbose_shows_the_noise_once():
    text = shown([*of("a", NOISE), *of("b", NOISE)], verbose=True)
    assert len([line for line in text if "UserWarning" in line]) == 1
    assert "RuntimeError: gloo" in text


def test_the_tail_gives_whole_lines_of_files_that_appear_and_grow(tmp_path):
    tail = LogTail(tmp_path)
    assert list(tail.read()) == []
    one = tmp_path / "node0-1234abcd-0.log"
    one.write_bytes(b"first\nsec")
    (tmp_path / "agent-node0.log").write_text("not Megatron's\n")
    assert list(tail.read()) == [(one.name, "first")]
    with open(one, "ab") as file:
        file.write(b"ond\nlast \xff")
    assert list(tail.read()) == [(one.name, "second")]
    assert list(tail.read(final=True)) == [(one.name, "last \ufffd")]
    assert list(tail.read(final=True)) == []


def test_a_reader_that_goes_away_does_not_end_the_job():
    """`deadpool run … | head` closes the pipe while the job runs."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        console = JobConsole(pipe)
        for step in range(3):
            console.print(f"step {step}")
        console.patient.drain()


def test_a_reader_that_stops_does_not_stop_the_job(monkeypatch):
    """Ctrl-S, a pager that waits, a terminal whose connection hangs: whoever prints coordinates the job. All comes once it is read."""
    monkeypatch.setattr(output, "WAITING_CHARS_MAX", 1 << 20)
    reader, writer = os.pipe()
    lines: list[str] = []
    with open(writer, "w") as pipe, open(reader) as read:
        console = JobConsole(pipe)
        for step in range(4000):  # two million characters; a pipe takes 65,536
            console.print(f"step {step:05} " + "x" * 500, soft_wrap=True)
        reading = threading.Thread(target=lambda: lines.extend(iter(read.readline, "the end\n")))
        reading.start()
        console.patient.drain()
        console.print("the end")
        console.patient.drain()
        reading.join(30)
    *steps, note = lines
    assert [line[:10] for line in steps] == [f"step {step:05}" for step in range(len(steps))] and len(steps) > 2000
    assert note == f"deadpool: {4000 - len(steps)} lines were left out here, since nobody read them; logs/ has them\n"
