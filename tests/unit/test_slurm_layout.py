"""What a task works out of Slurm's words (slurm/), and the script that `deadpool sbatch` writes."""

from __future__ import annotations

import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from megatron.hotswap import environment
from megatron.hotswap.agent.domain import failure_domain
from megatron.hotswap.agent.interface import address_of
from megatron.hotswap.cli.main import main
from megatron.hotswap.cli.sbatch import BatchJob
from megatron.hotswap.coordinator.job_file import Job
from megatron.hotswap.environment import SlurmTask
from megatron.hotswap.errors import UsageError
from megatron.hotswap.slurm.layout import gpus_of, work_out
from megatron.hotswap.slurm.run_files import forget_refusal, read_layout, refusal, refuse, split_run_dir, write_layout
from megatron.hotswap.slurm.task import of_this_life

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n2",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


def task(**others: str) -> SlurmTask:
    with pytest.MonkeyPatch.context() as patch:
        for name in environment.os.environ:
            if name.startswith(("SLURM", "CUDA")):
                patch.delenv(name)
        for name, value in (VARIABLES | others).items():
            patch.setenv(name, value)
        found = environment.slurm_task()
    assert found is not None
    return found


def test_one_srun_for_each_node_and_one_for_all_are_the_same_job():
    alone = work_out(task(), 1, None, 1)
    together = work_out(task(SLURM_STEP_NODELIST="n[1-3]", SLURM_STEP_TASKS_PER_NODE="1(x3)"), 1, None, 1)
    assert alone == together
    assert (alone.active, alone.spares, alone.world_size) == (("n1", "n2"), ("n3",), 8)


def test_the_last_spare_keeps_the_coordinator():
    assert work_out(task(), 1, None, 1).keepers(movable=False) == ["n3"]
    assert work_out(task(), 0, None, 1).keepers(movable=False) == ["n1"]
    assert work_out(task(), 1, None, 1).keepers(movable=True) == ["n3", "n1"]


def test_one_task_for_each_gpu_takes_its_share():
    one = task(SLURM_STEP_TASKS_PER_NODE="4", SLURM_LOCALID="2")
    layout = work_out(one, 1, None, 1)
    assert (layout.ranks_per_task, layout.agent(one), layout.world_size) == (1, "n2.2", 8)
    assert gpus_of(one, layout) == ("2",)
    assert gpus_of(task(SLURM_STEP_TASKS_PER_NODE="4", CUDA_VISIBLE_DEVICES="3"), layout) is None, "Slurm has bound it already"
    assert gpus_of(task(), work_out(task(), 1, None, 1)) is None
    assert failure_domain("node", "n2.2", "n2") == "n2"


def test_without_gpus_somebody_has_to_say_how_many_ranks():
    cpu = task(SLURM_GPUS_ON_NODE="", CUDA_VISIBLE_DEVICES="")
    with pytest.raises(UsageError, match="--hot-swap-ranks-per-node N"):
        work_out(cpu, 1, None, 1)
    assert work_out(cpu, 1, 2, 1).ranks_per_task == 2
    assert work_out(task(SLURM_GPUS_ON_NODE="", SLURM_STEP_TASKS_PER_NODE="2"), 1, None, 1).ranks_per_task == 1


def test_what_does_not_come_out_even_is_refused_in_words():
    with pytest.raises(UsageError, match=r"two nodes at least.*the job has 3 .*--hot-swap-spares is 2"):
        work_out(task(), 2, None, 1)
    with pytest.raises(UsageError, match=r"same number of tasks; Slurm started 2,1"):
        work_out(task(SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_TASKS_PER_NODE="2,1"), 0, None, 1)
    with pytest.raises(UsageError, match=r"4 ranks do not divide by 3 tasks"):
        work_out(task(SLURM_STEP_TASKS_PER_NODE="3"), 1, None, 1)
    with pytest.raises(UsageError, match=r"2 replicas .* --ntasks-per-node=1"):
        work_out(task(SLURM_STEP_TASKS_PER_NODE="4"), 0, None, 2)


def test_a_batch_script_is_no_task(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    assert environment.slurm_task() is None


def test_every_life_of_a_job_has_a_run_directory_of_its_own():
    argv = ["--save", "ck", "--lr", "1"]
    assert split_run_dir(argv, task()) == (Path("ck/runs/slurm-71-0"), argv)
    assert split_run_dir(argv, task(SLURM_RESTART_COUNT="2"))[0] == Path("ck/runs/slurm-71-2")
    assert split_run_dir(["--hot-swap-run-dir", "r", "--lr", "1"], task()) == (Path("r"), ["--lr", "1"])
    assert split_run_dir(["--hot-swap-run-dir=r"], task()) == (Path("r"), [])
    job = Job("n3:1", "71-0-abcd", 1)
    assert of_this_life(job, task()) and not of_this_life(job, task(SLURM_RESTART_COUNT="1"))


def test_a_refusal_reaches_the_tasks_that_wait_and_no_later_life(tmp_path):
    assert refusal(tmp_path, task()) == ""
    refuse(tmp_path, task(), "no")
    assert refusal(tmp_path, task()) == "no" and refusal(tmp_path, task(SLURM_RESTART_COUNT="1")) == ""
    forget_refusal(tmp_path)
    assert refusal(tmp_path, task()) == ""


def test_a_task_that_is_started_later_is_told_the_layout(tmp_path):
    """By then Slurm's own list is another: a lost node has left it."""
    layout = work_out(task(), 1, None, 1)
    assert read_layout(tmp_path, task()) is None
    write_layout(tmp_path, task(), layout)
    assert read_layout(tmp_path, task(SLURM_JOB_NODELIST="n[2-3]")) == layout
    assert read_layout(tmp_path, task(SLURM_RESTART_COUNT="1")) is None


def test_an_interface_is_named_by_name_network_or_address():
    assert address_of("lo", "x:1") == address_of("127.0.0.0/8", "x:1") == address_of("127.0.0.1", "x:1") == "127.0.0.1"
    with pytest.raises(UsageError, match=rf"ib7: host {socket.gethostname()} has no interface .* it has lo 127.0.0.1"):
        address_of("ib7", "x:1")


def test_the_script_is_one_that_bash_reads(tmp_path):
    words = ["pretrain_gpt.py", "--save", "a folder/ck", "--lr", "1"]
    job = BatchJob(words, 2, 3, 1, 4, None, 1, "1:00:00", "gpt", 5, directives=["--account=me"], setup=["module load x"], drain=True)
    text = job.text()
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    for line in ("#SBATCH --nodes=3-5", "#SBATCH --no-kill", "#SBATCH --requeue", "#SBATCH --account=me", "module load x", "active=2"):
        assert line in text.splitlines() or any(x.startswith(f"{line} ") for x in text.splitlines()), line
    assert "runs='a folder/ck/runs'" in text and "State=DRAIN" in text


@pytest.mark.parametrize(
    ("others", "rule"),
    [
        ({"nodes": 1}, "--nodes must be at least 2, got 1"),
        ({"spares_min": 4}, "--spares-min must be between 0 and --spares"),
        ({"spares": -1}, "--spares and --restarts-max are at least 0, got -1 and 1"),
        ({"gpus_per_node": 0}, "how many ranks has a node"),
        ({"tasks_per_node": 3}, "one task for all of its 4 ranks, or one for each"),
        ({"command": ["x.py", "--hot-swap-replicas", "2"]}, "more --nodes than replicas"),
        ({"nodes": 3, "tasks_per_node": 4, "command": ["x.py", "--hot-swap-replicas", "2"]}, "more than one replica --tasks-per-node 1"),
        ({"command": ["x.py", "--hot-swap-spares", "1"]}, "--hot-swap-spares is set by the script itself"),
    ],
)
def test_what_the_script_cannot_be_written_for(others, rule):
    described = {"command": ["x.py"], "nodes": 2, "spares": 1, "spares_min": 1, "gpus_per_node": 4, "ranks_per_node": None}
    more = {"tasks_per_node": 1, "time": "1", "name": "x", "restarts_max": 1}
    with pytest.raises(UsageError, match=rule):
        BatchJob(**(described | more | others))


def example_commands() -> list[list[str]]:
    """The `deadpool sbatch` commands of all examples."""
    pages = sorted((ROOT / "examples").glob("*/README.md"))
    blocks = [block for page in pages for block in page.read_text().split("```")[1::2]]
    return [shlex.split(block.replace("\n", " ")) for block in blocks if block.strip().startswith("deadpool sbatch")]


@pytest.mark.parametrize("words", example_commands(), ids=lambda words: words[words.index("--name") + 1])
def test_an_example_is_what_its_command_writes(words, tmp_path, monkeypatch):
    """DEADPOOL_WRITE_EXAMPLES=1 writes them anew."""
    at = words.index("--output") + 1
    example = ROOT / words[at]
    target = example if environment.os.environ.get("DEADPOOL_WRITE_EXAMPLES") == "1" else tmp_path / "job.sbatch"
    monkeypatch.setattr("sys.argv", [*words[:at], str(target), *words[at + 1 :]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert target.read_text() == example.read_text()
