"""megatron.training.arguments.

Replaced:
- `parse_args` (and, while it runs, `add_megatron_arguments`): the hot-swap flags join the parser; a warm worker waits here for its
  rank, since everything before it (imports, device, the parser) does not depend on the rank and everything after it does;
  combinations that hot-swap does not cover are refused.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from .. import config as hotswap_config
from ..errors import UsageError

#: Megatron parses its arguments twice before it builds anything: for itself, and to see whether a fault-tolerance package is wanted.
_PARSERS = 2


def join_parser(await_rank: Callable[[], None], adjust: Callable[[Namespace], None] = lambda args: None) -> None:
    """Patch the parser. `await_rank` puts the rank into the environment; `adjust` may change what was parsed."""
    from megatron.training import arguments

    original, fill = arguments.parse_args, arguments.add_megatron_arguments
    ready: list[ArgumentParser] | None = None

    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            parser = hotswap_config.add_arguments(parser)
            return extra_args_provider(parser) if extra_args_provider is not None else parser

        nonlocal ready
        if ready is None:
            # Megatron reads the sources of its configuration classes to describe 600 flags: most of a second, on no rank's account.
            ready = [fill(ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)) for _ in range(_PARSERS)]
            await_rank()
        if ready:
            parser = ready.pop()
            arguments.add_megatron_arguments = lambda _: parser
        args = original(provider, ignore_unknown_args)
        arguments.add_megatron_arguments = fill
        require_covered(args)
        adjust(args)
        return args

    arguments.parse_args = parse_args


def require_covered(args: Namespace) -> None:
    """Refuse what hot-swap does not cover, before anything is built.

    Raises:
        UsageError: names the flag.
    """
    uncovered = {
        "--async-strategy nvrx (give --async-strategy mcore)": args.async_save and args.async_strategy != "mcore",
        "--use-megatron-fsdp": getattr(args, "use_megatron_fsdp", False),
        "--use-torch-fsdp2": getattr(args, "use_torch_fsdp2", False),
        "--inprocess-restart": getattr(args, "inprocess_restart", False),
        "--num-distributed-optimizer-instances": getattr(args, "num_distributed_optimizer_instances", 1) > 1,
        "--perform-rl-step": getattr(args, "perform_rl_step", False),
    }
    given = [flag for flag, on in uncovered.items() if on]
    if given:
        raise UsageError(
            f"--hot-swap does not cover {', '.join(given)} yet; train without the flag or without --hot-swap"
        )
