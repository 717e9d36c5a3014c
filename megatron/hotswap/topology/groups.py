"""The process groups of this rank through all memberships: created by their members alone, kept where nothing happened to them,
rebuilt where something did, and replaced wherever they are held.

Every rank makes the same calls of `create` in the same order (Megatron derives them from the grid), and only counts those for groups
that it is not in. So the number of a call names a group on all its members, in every membership, and a recovery needs no further
call of Megatron's: it walks the list. What a rank does then depends on the groups that it is in, not on the size of the job.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import HotSwapError
from . import process_group
from .ledger import LEDGERS, Counts, Ledger, under_way
from .rebind import Holders, who_holds
from .sockets import Sockets

_WORLD = -1  # its number; the others count from 0


@dataclass(eq=False)
class Communicator:
    """One group that this rank is in."""

    number: int
    members: tuple[int, ...]  # global ranks, ascending
    backend: str
    options: Any = None
    description: str | None = None
    group: Any = None  # the newest one
    held: Any = None  # what references point to: another one than `group` after an attempt that was broken off
    version: int = 0  # of the membership that `group` was made in
    store: Any = None  # of that membership, as long as it is needed: torch does not keep a store of ours alive by itself
    sockets: Sockets = frozenset()  # its connections, where they are known
    broken: bool = True  # not complete, aborted, or to be aborted
    stand_in: bool = False  # what references point to never communicates

    @property
    def name(self) -> str:
        """That of the newest group in torch's registries, which want another one in each membership."""
        return f"membership{self.version}." + ("world" if self.number == _WORLD else str(self.number))

    @property
    def may_be_kept(self) -> bool:
        """Whether its kind can be kept at all: the connections of a large gloo group are not known one by one."""
        return self.number != _WORLD and not (self.backend == "gloo" and len(self.members) > process_group.EAGER_MEMBERS_MAX)

    @property
    def counts(self) -> Counts:
        """This member's view of it."""
        sound = not self.broken and self.group is self.held
        return LEDGERS.get(self.name, Ledger()).counts(self.version, sound)


@dataclass(frozen=True)
class Rebuilt:
    """What one rebuild did."""

    kept: int
    made: int
    references: int  # replaced
    reasons: dict[str, str] = field(default_factory=dict)  # of groups without a replaced member that were not kept: name -> why


class Groups:
    """The groups of this rank."""

    def __init__(
        self,
        collective_timeout: timedelta,
        join_timeout: timedelta,
        *,
        address: str | None = None,
        selective: bool = True,
        check: bool = False,
        device_idle: Callable[[], bool] = lambda: True,
        require_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            collective_timeout: of gloo's collectives while training: the last means to end one.
            join_timeout: of those until all ranks have joined (`settle`): a spare may still be building its model.
            address: this host's, for gloo.
            selective: keep groups to which nothing happened; else rebuild all.
            check: after each rebuild, see that nothing refers to an old group.
            device_idle: whether nothing runs on the device, communication included; waits a moment for that.
            require_wanted: raises once the membership whose groups are being made is over.
        """
        self.version = 0  # of the membership whose groups are created
        self.fake = False  # build groups that never communicate (a spare's first start)
        self._collective_timeout = collective_timeout
        self._join_timeout = join_timeout
        self._address = address
        self._selective = selective
        self._check = check
        self._device_idle = device_idle
        self._require_wanted = require_wanted
        self._world: Communicator | None = None  # an abort of NCCL's groups makes torch forget it; references do not
        self._mine: list[Communicator] = []
        self._calls = 0
        self._rank = 0
        self._holders: Holders | None = None

    # ---- creation

    def start_world(self, backend: str, store: dist.Store | None, rank: int, members: Sequence[int]) -> None:
        """Create the default group, as torch.distributed.init_process_group does."""
        self._rank = rank
        self._world = Communicator(_WORLD, tuple(members), backend, description="default_pg")
        self._begin(self._world, store)

    def create(self, ranks: Sequence[int] | None, backend: str | None, options: Any, description: str | None) -> Any:
        """Create one group as torch.distributed.new_group does, by its members alone, and remember it if this rank is in it.

        Returns:
            The group, or torch's GroupMember.NON_GROUP_MEMBER.
        """
        assert self._world is not None, "torch.distributed was not initialized through start_world"
        number, self._calls = self._calls, self._calls + 1
        members = tuple(sorted(ranks)) if ranks is not None else self._world.members
        if self._rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        made = Communicator(number, members, backend or self._world.backend, options, description)
        self._begin(made, self._world.store)
        self._mine.append(made)
        return made.group

    def _begin(self, made: Communicator, store: dist.Store) -> None:
        """The first of its groups."""
        if self.fake:
            made.version, made.stand_in = self.version, True
            made.group = process_group.make_stand_in(
                made.name, made.members, self._rank, made.backend, description=made.description, world=made.number == _WORLD
            )
        else:
            self._make([made], store)
        made.held = made.group

    def _make(self, renewed: Sequence[Communicator], store: dist.Store) -> None:
        """Make groups on a membership's store, gloo's first."""
        for made in renewed:
            made.version, made.store = self.version, store
            made.broken, made.sockets = True, frozenset()  # until it is complete
            LEDGERS[made.name] = Ledger()
        gloo = [made for made in renewed if made.backend == "gloo"]
        connected = process_group.connect_gloo(
            [made.name for made in gloo],
            [made.members for made in gloo],
            self._rank,
            store,
            timeout=self._join_timeout,
            address=self._address,
            require_wanted=self._require_wanted,
        )
        of_group = dict(zip(gloo, connected, strict=True))
        for made in renewed:
            made.group = process_group.make(
                made.name,
                made.members,
                self._rank,
                made.backend,
                store,
                gloo=of_group.get(made),
                timeout=self._join_timeout,
                options=made.options,
                description=made.description,
                world=made.number == _WORLD,
            )
            if made in of_group and made.may_be_kept:
                made.sockets = of_group[made].sockets
                of_group[made].store.release()
                made.store = None
            made.broken = False

    def settle(self) -> None:
        """All ranks have joined: from now on a collective of gloo's that takes long has lost a peer."""
        for made in self._all:
            if made.backend == "gloo":
                process_group.set_timeout(made.group, self._collective_timeout)

    # ---- the end of a membership

    def doom(self, lost: Collection[int] | None) -> list[Communicator]:
        """Monitor thread: mark the groups that a member has left for good (None: all), or that have unfinished work; returns those
        newly marked. The others may be kept."""
        doomed = []
        for made in list(self._all):
            ledger = LEDGERS.get(made.name)
            unfinished = ledger is not None and ledger.unfinished > 0
            if not made.broken and (lost is None or not made.may_be_kept or unfinished or not set(lost).isdisjoint(made.members)):
                made.broken = True
                doomed.append(made)
        return doomed

    def sound_sockets(self) -> Sockets:
        """Connections of the groups that may be kept."""
        return frozenset().union(*(made.sockets for made in list(self._mine) if not made.broken))

    @property
    def sockets(self) -> Sockets:
        """Connections of all groups, as far as they are known one by one."""
        return frozenset().union(*(made.sockets for made in self._mine))

    @property
    def _all(self) -> list[Communicator]:
        return [*([self._world] if self._world is not None else []), *self._mine]

    # ---- the next membership

    def find_holders(self) -> None:
        """The trainer stands still and there is time: find out who holds the groups, which `rebuild` would have to do."""
        self._holders = Holders([made.held for made in self._all])

    def rebuild(self, version: int, store: dist.Store, replaced: Collection[int]) -> Rebuilt:
        """Keep the groups to which nothing happened, make the others anew on the new membership's store, and replace the old ones
        everywhere.

        Args:
            replaced: ranks whose process is new; none of their groups is kept.

        Raises:
            HotSwapError: a group is there that was not created here; or an old one is held by what cannot be changed.
        """
        assert self._world is not None, "no group was created yet"
        self._require_known()
        self.fake = False
        verdicts = self._agree(version, store, set(replaced)) if self._selective else {}
        kept = [made for made in self._mine if self._selective and _keeps(made, verdicts)]
        renewed = [made for made in self._all if made not in kept]
        for made in renewed:
            made.broken = True
            LEDGERS.pop(made.name, None)
            process_group.forget(made.group)
            process_group.forget(made.held)
        self.version = version
        broken_off = [made.group for made in renewed if made.group is not made.held]  # an attempt before this one has made them
        self._make(renewed, store)
        _drop_beside(broken_off)
        # From here on nothing can fail for a peer's sake. Were it not so, the next attempt would still find `held`.
        references = self._replace(renewed)
        reasons = {made.description or made.name: why for made in renewed if (why := verdicts.get(made.number))}
        return Rebuilt(len(kept), len(renewed), references, reasons)

    def _replace(self, renewed: list[Communicator]) -> int:
        """Have everybody who holds an old group hold the new one."""
        stand_ins = [made for made in renewed if made.stand_in]
        for made in stand_ins:
            process_group.graft(made.held, made.group)
            made.group, made.stand_in = made.held, False
        if all(made.held is made.group for made in renewed):
            return 0
        if self._holders is None:
            self.find_holders()
        assert self._holders is not None
        old = [made.held for made in renewed if made.held is not made.group]  # not before: it would be found, and changed, with the others
        holders, self._holders = self._holders, None
        references = holders.replace({id(made.held): made.group for made in renewed})
        del holders
        for made in renewed:
            made.held = made.group
        if self._check and (left := who_holds(old)):
            raise HotSwapError(f"{len(left)} references to process groups of the membership before are left: {'; '.join(left[:20])}")
        _drop_beside(old)
        return references

    def _agree(self, version: int, store: dist.Store, replaced: set[int]) -> dict[int, str | None]:
        """Find with the other members of each group whether to keep it: the first one compares what all have counted.

        At most four operations on the store, whatever the number of groups and ranks.

        Returns:
            Number of a group with several members and none replaced -> why it is not kept, None if it is.
        """
        asked = [c for c in self._mine if c.may_be_kept and len(c.members) > 1 and replaced.isdisjoint(c.members)]
        if not asked:
            return {}
        idle = self._device_idle()
        mine = [msgspec.structs.replace(c.counts, idle=c.counts.idle and idle) for c in asked]
        store.multi_set([_key(c, version, self._rank) for c in asked], [_ENCODER.encode(counts) for counts in mine])
        led = [c for c in asked if c.members[0] == self._rank]
        verdicts: dict[int, str | None] = {}
        if led:
            heard = iter(store.multi_get([_key(c, version, member) for c in led for member in c.members]))
            for c in led:
                verdicts[c.number] = under_way({i: _DECODER.decode(next(heard)) for i in range(len(c.members))})
            store.multi_set([_key(c, version, None) for c in led], [(verdicts[c.number] or "").encode() for c in led])
        others = [c for c in asked if c.members[0] != self._rank]
        if others:
            for c, said in zip(others, store.multi_get([_key(c, version, None) for c in others]), strict=True):
                verdicts[c.number] = bytes(said).decode() or None
        return verdicts

    def _require_known(self) -> None:
        ours = {id(group) for made in self._all for group in (made.group, made.held)}
        foreign = [c10d._world.pg_names[group] for group in c10d._world.pg_map if id(group) not in ours]
        if foreign:
            raise HotSwapError(
                f"process groups {foreign} were not created through Megatron's parallel_state, so they cannot be rebuilt; create "
                "groups with megatron.core.parallel_state.create_group during initialize_model_parallel"
            )


def _drop_beside(groups: list[Any]) -> None:
    """Let groups go, in a thread; the list is empty then."""
    if groups:
        # No daemon: Python's end waits for it. Torch ends the process with an abort if it wants Python's lock back when there is none.
        threading.Thread(target=_drop, args=(groups,), name="deadpool-drop").start()


def _drop(groups: list[Any]) -> None:
    """Let groups go: gloo joins threads and closes connections, which others need not wait for. Torch lets go of Python's lock meanwhile.

    Then the allocator gives back what it keeps of them, and of the recovery: else a process grows with every one, by some 60 KiB
    in its steady state."""
    groups.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _keeps(made: Communicator, verdicts: dict[int, str | None]) -> bool:
    if len(made.members) == 1:
        return made.counts.idle
    return made.number in verdicts and verdicts[made.number] is None


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Counts)


def _key(made: Communicator, version: int, member: int | None) -> str:
    """Where a member's counts stand in the store of the membership that begins, or (None) what follows from all."""
    return f"membership{version}/group{made.number}/" + ("verdict" if member is None else str(member))
