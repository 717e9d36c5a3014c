"""A training script that wraps pretrain() for Megatron's in-process restart, as NVIDIA's own pretrain_gpt.py does; for inprocess.py.

The last rank's forward step raises once, in the step that DEADPOOL_BENCH_RAISES_IN says: in-process restart is best at exceptions.
"""

from __future__ import annotations

import faulthandler
import os
import time
from typing import Any

import pretrain_gpt
from megatron.hotswap.__main__ import prepare_device

BLOCKED_S = 10.0
RAISES_IN = int(os.environ.get("DEADPOOL_BENCH_RAISES_IN", "0"))
_raised = False


def forward_step(*args: Any, **kwargs: Any) -> Any:
    """The usual one; once it raises instead."""
    from megatron.training import get_args

    global _raised
    step = get_args().curr_iteration + 1
    if step == RAISES_IN and not _raised:
        faulthandler.dump_traceback_later(BLOCKED_S)  # says where a rank stands that does not get out
    if step == RAISES_IN and not _raised and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _raised = True
        print(f"in-process: rank {os.environ['RANK']} raises in step {step}, t {time.time():.3f}", flush=True)
        raise RuntimeError("an error on purpose")
    if step == RAISES_IN + 1 and _raised:
        print(f"in-process: step {RAISES_IN} is complete, t {time.time():.3f}", flush=True)
    return pretrain_gpt.forward_step(*args, **kwargs)


def _without_nvml() -> None:
    """The package's restart asks NVML for the state of GPUs and links, and gives the rank up where there is no NVML."""
    if os.environ.get("DEADPOOL_BENCH_WITHOUT_NVML"):
        from nvidia_resiliency_ext.inprocess import health_check

        for check in ("ChainedGPUHealthCheck", "ChainedNVLHealthCheck", "ChainedNicHealthCheck"):
            getattr(health_check, check).__call__ = lambda self, state: state
        print("in-process: the health checks by NVML are left out", flush=True)


def main() -> None:
    """Read Megatron's flags and train, wrapped."""
    _without_nvml()
    prepare_device()
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    print("in-process: wrapped", flush=True)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    wrapped(config, pretrain_gpt.datasets, ModelType.encoder_or_decoder, forward_step, store=store)
    print("in-process: trained to the end", flush=True)


if __name__ == "__main__":
    main()
