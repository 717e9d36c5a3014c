"""What the trainer of the megatron-core wheel needs on any device: the wheel has the dataset helpers compiled, and no Makefile."""

from __future__ import annotations

import importlib.util


def use_built_dataset_helpers() -> None:
    """Have initialize_megatron use the helpers that are there, where it would run make for them and end the process if that fails.

    Without built helpers (a source tree) Megatron compiles them as it does.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    import torch
    from megatron.training import initialize

    initialize._compile_dependencies = torch.distributed.barrier  # the one thing it does for the other ranks
