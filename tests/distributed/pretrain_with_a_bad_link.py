"""pretrain_gpt.py on a job one node of which has a bad link: collectives of whatever rank it has fail in some steps, once each."""

from __future__ import annotations

import os
import sys
from typing import Any

import pretrain_gpt

BAD_NODE, BAD_STEPS = "node1", {12, 16, 20}
_sound = pretrain_gpt.forward_step


def forward_step(*args: Any, **kwargs: Any) -> tuple:
    """The script's own, but for these."""
    from megatron.training import get_args

    step = get_args().curr_iteration + 1
    if os.environ["DEADPOOL_NODE"] == BAD_NODE and step in BAD_STEPS:
        BAD_STEPS.remove(step)
        raise RuntimeError("Connection closed by peer, as gloo says where a link is bad")
    return _sound(*args, **kwargs)


if __name__ == "__main__":
    from megatron.hotswap.__main__ import launch_or_train

    pretrain_gpt.forward_step = forward_step
    sys.exit(launch_or_train(__file__, pretrain_gpt.main))
