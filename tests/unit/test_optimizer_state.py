"""patches/distrib_optimizer.py: which of an optimizer's state is copied by address, and which travels as numbers.

The parameters are on torch's "meta" device, which stands for a GPU here: torch's own Adam then keeps exp_avg and exp_avg_sq there
and its step on the host, as it does on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron.hotswap.patches.distrib_optimizer import load_scalars, scalars, shard_tensors


def stepped(device: str) -> SimpleNamespace:
    parameter = torch.nn.Parameter(torch.zeros(8, device=device))
    parameter.grad = torch.zeros(8, device=device)
    adam = torch.optim.Adam([parameter], foreach=False)
    adam.step()
    return SimpleNamespace(optimizer=adam, is_stub_optimizer=False)


def names(optimizer: SimpleNamespace) -> list[str]:
    return [name.rsplit(".", 1)[1] for name, _ in shard_tensors(optimizer)]


def test_all_state_beside_its_parameter_is_a_tensor() -> None:
    optimizer = stepped("cpu")
    assert names(optimizer) == ["main", "exp_avg", "exp_avg_sq", "step"]
    assert scalars(optimizer)[0]["states"] == [{}]


def test_a_step_on_the_host_is_a_number_for_a_parameter_elsewhere() -> None:
    optimizer = stepped("meta")
    assert names(optimizer) == ["main", "exp_avg", "exp_avg_sq"]
    kept = scalars(optimizer)
    assert kept[0]["states"] == [{"step": 1.0}]
    (parameter,) = optimizer.optimizer.param_groups[0]["params"]
    step = optimizer.optimizer.state[parameter]["step"]
    step.fill_(5.0)
    load_scalars(optimizer, kept)
    assert optimizer.optimizer.state[parameter]["step"] is step and step.item() == 1.0
