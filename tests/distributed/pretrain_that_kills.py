"""pretrain_gpt.py with a step that takes a node with it: whoever runs rank 1's step 5 loses its agent, and so the node."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pretrain_gpt

FATAL_STEP, FATAL_RANK = 5, 1
_sound = pretrain_gpt.forward_step


def forward_step(*args: Any, **kwargs: Any) -> tuple:
    """The script's own, but for that step."""
    import torch.distributed as dist
    from megatron.training import get_args

    if get_args().curr_iteration + 1 == FATAL_STEP and dist.get_rank() == FATAL_RANK:
        os.kill(os.getppid(), signal.SIGKILL)
    return _sound(*args, **kwargs)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    pretrain_gpt.forward_step = forward_step
    sys.exit(launch_or_train(__file__, pretrain_gpt.main))
