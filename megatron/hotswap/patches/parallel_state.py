"""megatron.core.parallel_state.

Replaced:
- `create_group`: so that every group is known in its order of creation, has a timeout of seconds where it is gloo's, and is a
  stand-in that never communicates in a spare that builds its rank (topology/groups.py).
- `initialize_model_parallel`: its arguments are kept, to be called again for the next membership.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..topology.groups import Groups


class ParallelState:
    """Megatron's parallel state, able to begin again."""

    def __init__(self, groups: Groups) -> None:
        from megatron.core import parallel_state

        self._module = parallel_state
        self._groups = groups
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._initialize = parallel_state.initialize_model_parallel
        parallel_state.create_group = self._create_group
        parallel_state.initialize_model_parallel = self._initialize_and_remember

    def _initialize_and_remember(self, *args: Any, **kwargs: Any) -> None:
        self._call = (args, kwargs)
        self._initialize(*args, **kwargs)

    def _create_group(
        self,
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        import torch.distributed as dist

        group = self._groups.create(ranks, backend, pg_options, timeout, group_desc)
        module = self._module
        if module._global_process_group_list is None:
            module._global_process_group_list = [None]
        if ranks is not None and dist.get_rank() in ranks:
            module._global_process_group_list.append(group)
        return group

    def begin_again(self) -> None:
        """Create all groups of the grid anew, on the torch.distributed that is initialized now."""
        assert self._call is not None, "Megatron has not initialized its parallel state yet"
        self._module.destroy_model_parallel()
        self._module._global_process_group_list = None
        args, kwargs = self._call
        self._initialize(*args, **kwargs)
