"""What else a user may do: one task for each rank; a job whose coordinator's node is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import Lab
from slurm_job import batch, command, submit, until

pytestmark = pytest.mark.timeout(600)
FULL = os.environ.get("DEADPOOL_FULL_MATRIX") == "1"
_STARTS_WITHIN_S = 240.0


def test_one_task_for_each_rank(lab: Lab, tmp_path: Path) -> None:
    """Two tasks on each node are two agents of one failure domain: both are lost with their node, and two of the spare take over."""
    words = command(60, tmp_path / "job" / "save", "--tensor-model-parallel-size 2")
    job = submit(lab, tmp_path / "job", batch(words, 2, 1, 1, ranks_per_node=2, tasks_per_node=2).text(), "--nodelist=n1,n2,n3")
    try:
        start = until("training", lambda: job.events("start"), _STARTS_WITHIN_S)[0]
        assert start["nodes"] == ["n1.0", "n1.1", "n2.0", "n2.1"] and start["spares"] == ["n3.0", "n3.1"]
        hosts = [name.split(".")[0] for name in start["nodes"]]
        assert all(hosts[h] != hosts[rank] for rank, held_by in enumerate(start["holders"]) for h in held_by)
        job.goes_on()
        lab.crash("n2")
        until("a recovery", lambda: job.events("recovered"))
        assert sorted(e["node"] for e in job.events("assign")) == ["n3.0", "n3.1"]
        until("the end", lambda: job.state() not in ("RUNNING", "COMPLETING"), _STARTS_WITHIN_S)
        assert job.state() == "COMPLETED" and len(job.steps()) == 60
    except BaseException:
        print(job.told())
        raise
    finally:
        lab.run("scancel", job.number, check=False)
        lab.boot("n2")
