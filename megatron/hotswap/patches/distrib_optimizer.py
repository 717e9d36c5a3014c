"""megatron.core.optimizer.

Replaced:
- `step` of ChainedOptimizer, MixedPrecisionOptimizer and FP32Optimizer: the fence stands before it (design, section 4).
- `step_with_ready_grads` of MixedPrecisionOptimizer and FP32Optimizer: progress is noted between the inner optimizer's step and
  the parameter all-gather.

And read: the inner optimizers' parameters and states, which are what a snapshot consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def put_fence(fence: Callable[[], None], enter: Callable[[str], None]) -> None:
    """Have every optimizer step pass the fence first."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer

    for owner in (ChainedOptimizer, MixedPrecisionOptimizer, FP32Optimizer):
        owner.step = _fenced(owner.step, fence)
    for owner in (MixedPrecisionOptimizer, FP32Optimizer):
        owner.step_with_ready_grads = _noted(owner.step_with_ready_grads, enter)


def _fenced(step: Any, fence: Callable[[], None]) -> Any:
    def fenced_step(self: Any) -> Any:
        fence()
        return step(self)

    return fenced_step


def _noted(step_with_ready_grads: Any, enter: Callable[[str], None]) -> Any:
    def noted_step(self: Any) -> Any:
        done = step_with_ready_grads(self)
        enter("optimizer")
        return done

    return noted_step


def optimizers(optimizer: Any) -> list[Any]:
    """Megatron's optimizers of this rank that own parameters."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [o for o in parts if not getattr(o, "is_stub_optimizer", False)]


def require_supported(optimizer: Any) -> None:
    """Refuse optimizers whose state is not (only) in the inner optimizer.

    Raises:
        UsageError: names the flag.
    """
    from ..errors import UsageError

    for part in optimizers(optimizer):
        config = part.config
        for flag in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
            if getattr(config, flag, None):
                raise UsageError(
                    f"--hot-swap does not cover --{flag.replace('_', '-')} yet: that optimizer keeps state which snapshots do not "
                    "hold; train without the flag or without --hot-swap"
                )


def fill_states(optimizer: Any) -> None:
    """Give every inner optimizer the state tensors that it otherwise makes in its first step, all zeros, as they begin there.

    So the layout of a snapshot is the same before the first step as after it. A step with zero gradients and a learning rate of
    zero makes them, whatever the optimizer is; parameters and scalars are put back.
    """
    for part in optimizers(optimizer):
        inner = part.optimizer
        empty = [p for group in inner.param_groups for p in group["params"] if p.numel() and not inner.state.get(p)]
        if not empty:
            continue
        kept_params = [p.detach().clone() for p in empty]
        kept_groups = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        kept_grads = [p.grad for group in inner.param_groups for p in group["params"]]
        for group in inner.param_groups:
            group["lr"] = 0.0
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
            for p in group["params"]:
                p.grad = None
        for p in empty:
            p.grad = torch.zeros_like(p)
        inner.step()
        with torch.no_grad():
            for p, kept in zip(empty, kept_params, strict=True):
                p.copy_(kept)
                for value in inner.state[p].values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        for group, kept in zip(inner.param_groups, kept_groups, strict=True):
            for key in [k for k in group if k != "params"]:
                if key in kept:
                    group[key] = kept[key]
                else:
                    del group[key]
        params = [p for group in inner.param_groups for p in group["params"]]
        for p, grad in zip(params, kept_grads, strict=True):
            p.grad = grad


def shard_tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's main parameters and every state tensor of the inner optimizers, by name, in an order fixed by the model."""
    for o, part in enumerate(optimizers(optimizer)):
        inner = part.optimizer
        for g, group in enumerate(inner.param_groups):
            for i, p in enumerate(group["params"]):
                if not p.numel():
                    continue
                yield f"optimizer{o}.group{g}.{i}.main", p.detach()
                state = inner.state.get(p, {})
                for key in sorted(k for k, v in state.items() if _beside(v, p)):
                    yield f"optimizer{o}.group{g}.{i}.{key}", state[key]


def scalars(optimizer: Any) -> list[dict[str, Any]]:
    """Per optimizer: the groups' scalars, the states' scalars and the gradient scaler."""
    result = []
    for part in optimizers(optimizer):
        inner = part.optimizer
        states = []
        for group in inner.param_groups:
            for p in group["params"]:
                state = inner.state.get(p, {})
                apart = {k: v.item() for k, v in state.items() if isinstance(v, torch.Tensor) and not _beside(v, p)}
                states.append({**{k: v for k, v in state.items() if _plain(v)}, **apart})
        scaler = getattr(part, "grad_scaler", None)
        result.append(
            {
                "groups": [{k: v for k, v in group.items() if _plain(v)} for group in inner.param_groups],
                "states": states,
                "scaler": _scaler_state(scaler),
            }
        )
    return result


def load_scalars(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Put them back."""
    for part, kept in zip(optimizers(optimizer), saved, strict=True):
        inner = part.optimizer
        for group, values in zip(inner.param_groups, kept["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in values.items()})
        params = [p for group in inner.param_groups for p in group["params"]]
        for p, values in zip(params, kept["states"], strict=True):
            state = inner.state[p] if values else {}
            for key, value in values.items():
                if isinstance(state.get(key), torch.Tensor):
                    state[key].fill_(value)
                else:
                    state[key] = value
        if kept["scaler"] is not None:
            part.grad_scaler.load_state_dict(
                {
                    k: torch.tensor([v], dtype=torch.float, device=torch.cuda.current_device()) if k == "scale" else v
                    for k, v in kept["scaler"].items()
                }
            )


def _scaler_state(scaler: Any) -> dict[str, Any] | None:
    if scaler is None:
        return None
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in scaler.state_dict().items()} or None


def _beside(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state is a tensor on its parameter's device. torch's own Adam keeps its step count, a number, on the host: copies
    from a device go by its address there, so the number travels with the scalars."""
    return isinstance(value, torch.Tensor) and value.device == parameter.device


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def main_to_model(optimizer: Any, model: list[Any]) -> None:
    """Model parameters from main parameters: cast into this rank's part, then all-gather over DP where it is sharded.

    The very code that ends an optimizer step: _copy_main_params_to_model_params and start_param_sync. Collective.
    """
    with torch.no_grad():
        for part in optimizers(optimizer):
            cast = getattr(part, "_copy_main_params_to_model_params", None)
            if cast is not None:
                cast()
        for chunk in model:
            config = getattr(chunk, "ddp_config", None)
            if config is not None and config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)


def forget_first_use(optimizer: Any) -> None:
    """Clear what optimizers cache after a collective of their first step: a spare has not cached it, and must not be alone in it."""
    for part in [optimizer, *(getattr(optimizer, "chained_optimizers", None) or [])]:
        if getattr(part, "_has_grad_norm_group_cache", None):
            part._has_grad_norm_group_cache = None


def step_proves_commit(optimizer: Any, world_size: int) -> bool:
    """Whether every step's gradient norm is reduced over the whole world, behind each rank's fence (design, section 4)."""
    return all(
        part.config.clip_grad > 0 and part.get_grad_stats_parallel_group().size() == world_size
        for part in optimizers(optimizer)
    )
