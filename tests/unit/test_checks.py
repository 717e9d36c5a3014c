"""Bad input is answered in words before any process starts."""

import argparse
import io
import pickle
import socket
import struct
import zipfile
from pathlib import Path

import pytest

from megatron.hotswap.cli import checks
from megatron.hotswap.cli.checkpoint_args import saved_flags
from megatron.hotswap.cli.launch import Launch, prepare
from megatron.hotswap.errors import UsageError

SCRIPT = str(Path(__file__).parents[2] / "pretrain_gpt.py")


def refused(argv, world_size=4):
    with pytest.raises(UsageError) as refusal:
        checks.check_command(SCRIPT, argv.split(), world_size)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--tensor-model-parallel-size 3", "4 is not a multiple of 3 x 1 x 1"),
        ("--num-layers 5 --pipeline-model-parallel-size 2", "5 is not a multiple of 2"),
        ("--num-attention-heads 3 --tensor-model-parallel-size 2", "3 is not a multiple of 2"),
        ("--hidden-size 30 --num-attention-heads 4", "30 is not a multiple of 4"),
        ("--num-experts 3 --expert-model-parallel-size 2", "3 is not a multiple of 2"),
        ("--micro-batch-size 2 --global-batch-size 12", "12 is not a multiple of 8"),
        ("--num-layers 0", "--num-layers must be at least 1, got 0"),
        ("--num-layers many", "invalid int value: 'many'"),
        ("--hot-swap-run-dir x", "--hot-swap-run-dir is set by `deadpool run` itself"),
        ("--data-path /nowhere/corpus", "there is no such file"),
        ("--load /nowhere/checkpoint", "there is no such directory"),
    ],
)
def test_refusals_state_rule_and_values(argv, words):
    assert words in refused(argv)


def test_a_good_command_passes():
    checks.check_command(
        SCRIPT, ["--tensor-model-parallel-size", "2", "--num-attention-heads", "4", "--micro-batch-size", "2"], 4
    )


def test_the_script_must_be_there():
    with pytest.raises(UsageError, match="is not a file"):
        checks.check_command("/nowhere/train.py", [], 4)


@pytest.mark.parametrize(
    ("nodes", "ranks", "spares", "words"),
    [
        (1, 4, 1, "at least two nodes"),
        (0, 2, 0, "--nodes must be"),
        (2, 0, 0, "--ranks-per-node"),
        (2, 2, -1, "--spares"),
    ],
)
def test_nodes(nodes, ranks, spares, words):
    with pytest.raises(UsageError, match=words):
        checks.check_nodes(nodes, ranks, spares)


def write_index(prefix, lengths, code=8):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    body = struct.pack(f"<{len(lengths)}i", *lengths) + bytes(8 * len(lengths) + 8 * (len(lengths) + 1))
    Path(f"{prefix}.idx").write_bytes(head + body)
    Path(f"{prefix}.bin").write_bytes(bytes(2 * sum(lengths)))


def test_data_files(tmp_path):
    prefix = tmp_path / "corpus"
    write_index(prefix, [5, 7, 300])
    checks.check_data(str(prefix))
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(UsageError, match="does not fit its index: it has 622 bytes, the index says 624"):
        checks.check_data(str(prefix))
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UsageError, match="is cut short"):
        checks.check_data(str(prefix))
    index.write_bytes(b"hello")
    with pytest.raises(UsageError, match="is not a Megatron index file"):
        checks.check_data(str(prefix))
    index.unlink()
    with pytest.raises(UsageError, match="there is no such file"):
        checks.check_data(str(prefix))


def test_a_blend_of_weights_and_paths_is_checked(tmp_path):
    write_index(tmp_path / "a", [3])
    assert "b.idx" in refused(f"--data-path 0.3 {tmp_path}/a 0.7 {tmp_path}/b")


# ---- checkpoints


def write_checkpoint(folder, **flags):
    """As Megatron leaves it: a tracker, and common.pt with the arguments in a zipped pickle."""
    (folder / "iter_0000020").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        state = {"args": argparse.Namespace(**flags), "other": Path("a class that is not built")}
        archive.writestr("common/data.pkl", pickle.dumps(state, protocol=2))
    (folder / "iter_0000020/common.pt").write_bytes(raw.getvalue())


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    write_checkpoint(tmp_path / "ck", num_layers=8, hidden_size=64, num_attention_heads=4)
    assert saved_flags(tmp_path / "ck", "20")["num_layers"] == 8
    words = refused(f"--load {tmp_path}/ck --num-layers 4 --hidden-size 64")
    assert "saved with --num-layers 8, and this job has --num-layers 4" in words
    checks.check_command(SCRIPT, f"--load {tmp_path}/ck --num-layers 8 --hidden-size 64".split(), 4)
    checks.check_command(SCRIPT, f"--load {tmp_path}/ck --num-layers 4 --use-checkpoint-args".split(), 4)


def test_a_checkpoint_that_cannot_be_read_is_left_to_megatron(tmp_path):
    write_checkpoint(tmp_path / "ck", num_layers=8)
    (tmp_path / "ck/iter_0000020/common.pt").write_bytes(b"not a zip")
    assert saved_flags(tmp_path / "ck", "20") == {}


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    write_checkpoint(tmp_path / "ck")
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": Hostile()}))
    (tmp_path / "ck/iter_0000020/common.pt").write_bytes(raw.getvalue())
    assert saved_flags(tmp_path / "ck", "20") == {}
    assert not (tmp_path / "written").exists()


def test_a_first_start_may_name_the_same_empty_directory_to_load_and_save(tmp_path):
    checks.check_command(SCRIPT, f"--load {tmp_path}/new --save {tmp_path}/new".split(), 4)
    assert "no latest_checkpointed_iteration.txt" in refused(f"--load {tmp_path}")


# ---- before a launch


def launch(tmp_path, argv="", **changes):
    values = {
        "nodes": 2,
        "ranks_per_node": 2,
        "spares": 0,
        "script": SCRIPT,
        "argv": argv.split(),
        "run_dir": tmp_path / "run",
    }
    return Launch(**{**values, **changes})


def test_deadlines_in_the_wrong_order_are_refused(tmp_path):
    with pytest.raises(UsageError, match="a lease must outlast three heartbeats"):
        prepare(launch(tmp_path, "--hot-swap-lease-s 1 --hot-swap-heartbeat-interval-s 0.5"))


def test_a_directory_in_which_a_job_runs_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.json").write_text('{"coordinator": "127.0.0.1:1", "run_id": "r", "pid": 1}')
    with pytest.raises(UsageError, match=r"a job \(process 1\) runs in"):
        prepare(launch(tmp_path))


def test_results_of_an_earlier_run_do_not_stay(tmp_path):
    (tmp_path / "run/logs").mkdir(parents=True)
    for name in ("summary.json", "run.png", "logs/node0-1234-0.log"):
        (tmp_path / "run" / name).write_text("old")
    (tmp_path / "run/mine.txt").write_text("mine")
    prepare(launch(tmp_path))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["command.json", "credentials", "logs", "mine.txt"]
    assert not list((tmp_path / "run/logs").iterdir())


def test_a_port_in_use_is_refused(tmp_path):
    import asyncio

    from megatron.hotswap.cli.launch import run

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(run(launch(tmp_path, port=port)))


def test_where_ranks_share_cores_the_lease_is_longer_unless_the_user_chose_one(monkeypatch):
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: {0, 1})
    assert checks.lease_for_shared_cores([], 1) == []
    assert checks.lease_for_shared_cores([], 2) == ["--hot-swap-lease-s", "10"]
    assert checks.lease_for_shared_cores(["--hot-swap-lease-s", "3"], 4) == []
    assert checks.lease_for_shared_cores(["--hot-swap-lease-s=3"], 4) == []
