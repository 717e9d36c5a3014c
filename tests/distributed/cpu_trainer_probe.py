"""Runs pretrain_gpt.py without a GPU and prints losses and gradient norms as hex floats, which the trainer's log
rounds.

One line per rank and step: PROBE rank iteration loss norm. Only ranks of the last pipeline stage know the loss. At
the end one line per parameter of each rank: DIGEST rank name hash.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from typing import Any


def hex_of(value: Any) -> str:
    return "none" if value is None else float(value).hex()


def printing(training_log: Any) -> Any:
    """The trainer's training_log, which every rank calls after every step, with a line of exact values before it."""
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        step = given.arguments
        loss = hex_of(step["loss_dict"].get("lm loss"))
        print(f"\nPROBE {os.environ['RANK']} {step['iteration']} {loss} {hex_of(step['grad_norm'])}", flush=True)
        return training_log(*args, **kwargs)

    return log


def digesting(train: Any) -> Any:
    """The trainer's train(), followed by one line per parameter of this rank."""
    signature = inspect.signature(train)

    @functools.wraps(train)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        for chunk in signature.bind(*args, **kwargs).arguments["model"]:
            for name, parameter in chunk.named_parameters():
                digest = hashlib.sha256(parameter.detach().float().numpy().tobytes()).hexdigest()[:16]
                print(f"\nDIGEST {os.environ['RANK']} {name} {digest}", flush=True)
        return result

    return run


if __name__ == "__main__":
    from megatron.hotswap.device import cpu

    sys.argv[1:] += cpu.default_flags(sys.argv[1:])
    cpu.install()

    from megatron.training import training

    import pretrain_gpt

    training.training_log = printing(training.training_log)
    training.train = digesting(training.train)
    pretrain_gpt.main()
    # The device layer is what runs here without a GPU, and it can refuse; nothing else of hot-swap may have been touched.
    device = ("", ".device", ".device.cpu", ".device.wheel", ".errors")
    ours = sorted(m for m in sys.modules if m.startswith("megatron.hotswap") and m.removeprefix("megatron.hotswap") not in device)
    print(f"\nOURS {','.join(ours) or 'none'}", flush=True)
