"""The batch script that waits for the job's end (cli/sbatch.py), and what is done in its place where its host was lost.

Slurm keeps a job whose batch host is gone (--no-kill), without anybody who could end it. Such a job is put back into the queue. It is
requeued to go on; or, where the training is over, only so that the script, started again, passes its exit code on to Slurm.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ..environment import SlurmTask

#: There while the script lives and means to see the job's end; it has its host's name.
BATCH_HOST = "batch-host"
#: The script looks every second; a network file system may tell it late.
_ANSWERS_WITHIN_S = 15.0
_POLL_S = 0.2
_SCONTROL_TIMEOUT_S = 60.0


def answer_for_batch_script(run_dir: Path, task: SlurmTask) -> None:
    """Once the job is over: leave the rest to the batch script, if it takes notice."""
    marker = run_dir / BATCH_HOST
    try:
        host = marker.read_text().strip()
    except OSError:
        return  # somebody else's script, or none
    deadline = time.monotonic() + _ANSWERS_WITHIN_S
    while marker.exists():
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    else:
        return
    print(f"deadpool: the batch script on {host} takes no notice of the job's end: job {task.job} is put back into the queue", flush=True)
    marker.unlink(missing_ok=True)
    command = ["scontrol", "requeue", str(task.job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False)
        trouble = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        trouble = str(failure)
    if trouble:
        print(f"deadpool: {' '.join(command)}: {trouble}; do it by hand, or scancel {task.job}", file=sys.stderr, flush=True)
