"""pretrain_gpt.py on a job whose rank 1 stands still when it is to read its data from an earlier step on, as where a file server hangs.
Once: the file named by DEADPOOL_TEST_MARK says that it has happened."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pretrain_gpt
from megatron.hotswap.patches.adapter import MegatronTrainer

_sound = MegatronTrainer.rewind_data


def rewind_data(trainer: MegatronTrainer, generation: int) -> None:
    """The trainer's own, but for that."""
    import torch.distributed as dist

    mark = Path(os.environ["DEADPOOL_TEST_MARK"])
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        time.sleep(3600.0)
    _sound(trainer, generation)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    MegatronTrainer.rewind_data = rewind_data
    sys.exit(launch_or_train(__file__, pretrain_gpt.main))
