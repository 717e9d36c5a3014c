"""pretrain_gpt.py on a job whose rank 1 keeps Python's lock for 25 s in its eighth step, and says so beforehand: as a compiler may. Once:
the file named by DEADPOOL_TEST_MARK says that it has begun."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.hotswap.long_work import long_work

LONG_S = 25
STEP = 8
_sound = pretrain_gpt.forward_step


def forward_step(*args: Any, **kwargs: Any) -> tuple:
    """The script's own, but for that."""
    import torch.distributed as dist
    from megatron.training import get_args

    mark = Path(os.environ["DEADPOOL_TEST_MARK"])
    if dist.get_rank() == 1 and get_args().curr_iteration == STEP - 1 and not mark.exists():
        with long_work():
            mark.touch()
            ctypes.PyDLL(None).sleep(LONG_S)  # PyDLL does not let go of the lock
    return _sound(*args, **kwargs)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    pretrain_gpt.forward_step = forward_step
    sys.exit(launch_or_train(__file__, pretrain_gpt.main))
