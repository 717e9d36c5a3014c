"""pretrain_gpt.py with an error of its own: a micro-batch of step 5 raises, on whichever process and however often it is tried."""

from __future__ import annotations

import sys
from typing import Any

import pretrain_gpt

FAILING_STEP = 5
_sound = pretrain_gpt.forward_step


def forward_step(*args: Any, **kwargs: Any) -> tuple:
    """The script's own, but for that step."""
    from megatron.training import get_args

    if get_args().curr_iteration + 1 == FAILING_STEP:
        raise ValueError("a sample that cannot be read")
    return _sound(*args, **kwargs)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    pretrain_gpt.forward_step = forward_step
    sys.exit(launch_or_train(__file__, pretrain_gpt.main))
