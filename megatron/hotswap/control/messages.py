"""Everything that agents and the coordinator tell each other, as frozen values.

The same values are the core's events, travel as msgpack (msgspec: typed, bounded, nothing is unpickled), and are what the
simulator delays, drops and repeats. `PROTOCOL` changes whenever a field does; a peer of another protocol is refused by name.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..snapshot.manifest import DurableFile as DurableFile
from .progress import LONG_WORK as LONG_WORK
from .progress import PHASES as PHASES
from .progress import Progress as Progress

PROTOCOL = 11
#: Faults of the network between nodes, which the launcher causes: their node is cut off, and cannot be told of the end of it.
CABLE_FAULTS = ("unplug", "plug")
#: Faults that a worker's own training thread causes: an exception, a segmentation fault, memory that runs out, a sleep without end,
#: one that keeps Python's lock, and a collective that fails as over a broken link. The agent causes the others.
WORKER_FAULTS = ("exit", "segv", "oom", "hang", "spin", "fail-collective")


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Member(msgspec.Struct, frozen=True):
    """Who holds a rank."""

    node: str
    incarnation: str  # one life of one agent process: a returned node has another
    worker: int  # index among the agent's workers
    h2h: str  # "host:port" where the agent takes and serves snapshots


class Membership(msgspec.Struct, frozen=True):
    """The map rank -> member, and rank -> ranks whose agents hold its replicas. Versions only grow."""

    version: int
    members: tuple[Member, ...]
    holders: tuple[tuple[int, ...], ...]

    def holders_of(self, rank: int) -> tuple[Member, ...]:
        """The members whose agents hold the rank's replicas."""
        return tuple(self.members[h] for h in self.holders[rank])

    def held_by(self, incarnation: str) -> frozenset[int]:
        """The ranks whose replicas this agent holds."""
        return frozenset(r for r, held in enumerate(self.holders) if any(self.members[h].incarnation == incarnation for h in held))


class Source(msgspec.Struct, frozen=True):
    """An agent that has a snapshot to fetch."""

    incarnation: str
    h2h: str


class Injection(msgspec.Struct, frozen=True):
    """A fault to cause: `deadpool inject`."""

    action: Literal["kill", "freeze", "exit", "segv", "oom", "hang", "spin", "fail-collective", "unplug", "plug"]
    scope: Literal["node", "agent", "worker"]
    node: str
    worker: int = 0
    at_step: int | None = None  # the step (1 is the first) in which it strikes; None: at once
    phase: str | None = None


class StepRecord(msgspec.Struct, frozen=True):
    """What one completed step looked like, from the rank that logs. Floats as hex are exact."""

    step: int
    version: int
    consumed_samples: int
    seconds: float
    exposed_stall_s: float
    loss: dict[str, str]  # name -> float.hex()
    grad_norm: str | None
    tokens: int = 0


# ---- agent to coordinator


class Join(_Message, frozen=True):
    """An agent is up and has `workers` worker processes on the way."""

    protocol: int
    run_id: str
    token: str
    node: str
    incarnation: str
    workers: int
    h2h: str
    domain: str = ""  # what fails together with this node; empty: nothing but itself
    unhealthy: str = ""  # what its own check at start has found; such a node is not let in, and that is written down


class Rejoin(_Message, frozen=True):
    """An agent that has joined before lost its coordinator, and says where it stands to the one that it has found. What it had to say
    since follows, as far as it still matters."""

    join: Join
    version: int  # the newest membership that it has heard of; 0: none
    ranks: dict[int, int]  # worker -> rank, of those whose process knows its rank
    halted: bool  # it has stopped its ranks, since it heard nobody for too long
    away_s: float


class WorkerReady(_Message, frozen=True):
    """A worker is warm: imports done, waiting for a rank. `store` is an unused rendezvous store it serves."""

    worker: int
    store: str


class Heartbeat(_Message, frozen=True):
    """The agent lives, and its ranks are so far. Sent every heartbeat interval; whatever else it sends says that it lives, too."""

    sequence: int
    progress: dict[int, Progress] = {}


class Acknowledged(_Message, frozen=True):
    """Every holder of `rank` has the whole, checked snapshot of `generation`.

    `version` is that of the membership whose holders they are; one of an old membership says nothing about today's holders. `d2h_s`
    is how long the copy into the own slot took, `h2h_s` how long it took from then on until the holders had it. Where the payload
    was not sent, since these `peers` have the same one, `payload_crc` is its CRC32C.
    """

    rank: int
    generation: int
    version: int
    d2h_s: float = 0.0
    h2h_s: float = 0.0
    payload_crc: int | None = None
    peers: tuple[int, ...] = ()


class Skipped(_Message, frozen=True):
    """`rank` has not taken the generation, since the one before was not committed yet. So it will never be complete."""

    rank: int
    generation: int
    version: int


class CopyDamaged(_Message, frozen=True):
    """A copy of a snapshot was of no use: damaged, another one than was asked for, or not to be had from this holder."""

    rank: int
    generation: int
    version: int
    incarnation: str  # of the agent that has it; the rank's own agent for an own slot
    text: str


class StepDone(_Message, frozen=True):
    """A step is complete on the rank that logs."""

    record: StepRecord


class WorkerError(_Message, frozen=True):
    """A worker's training thread caught an exception outside a halt and waits for orders."""

    rank: int
    version: int
    step: int
    collective: bool  # raised by communication, so a peer or a link may be to blame
    text: str


class WorkerLost(_Message, frozen=True):
    """A worker process ended, or stopped, without saying goodbye."""

    worker: int
    evidence: str


class HaltReport(_Message, frozen=True):
    """A rank's training thread is out, and this is what it has. `done` is None for a process that has no state yet: a spare's, or one
    that was started again, whose slots its agent has kept."""

    version: int  # the version that is over
    rank: int
    done: int | None  # the generation its live state was last equal to
    between_steps: bool  # halted after the end of step `done`, in logging, evaluation or saving
    own: tuple[int, ...]  # generations complete in its own slots
    store: str
    out_s: float = 0.0  # how long it took from the order until the training thread was out


class ReplicaReport(_Message, frozen=True):
    """The complete replicas an agent holds: rank -> generations."""

    version: int
    replicas: dict[int, tuple[int, ...]]


class Restored(_Message, frozen=True):
    """A rank has rebuilt its groups and its state and is about to run the next step."""

    version: int
    rank: int
    rebuild_s: float
    restore_s: float
    bytes_restored: int
    steps_rerun: int  # completed steps this rank runs again
    groups_kept: int = 0
    groups_made: int = 0
    generation: int | None = None  # that it has read from Megatron's checkpoint; None: from memory, the plan's


class FirstStep(_Message, frozen=True):
    """A rank has completed the first new step of a membership."""

    version: int
    rank: int


class Finished(_Message, frozen=True):
    """A worker came to the end of its script (or could not begin: `text` says why)."""

    worker: int
    rank: int | None
    code: int
    text: str = ""


class Unhealthy(_Message, frozen=True):
    """Something on the node that knows says that it is not fit to train: a device, or the site's health command. `fatal` is evidence
    enough to give its ranks to a spare; else it is a warning."""

    source: Literal["device", "command"]
    reason: str
    fatal: bool = True


class HealthyAgain(_Message, frozen=True):
    """What this source has said before is over."""

    source: Literal["device", "command"]


class Note(_Message, frozen=True):
    """Something to write into events.jsonl."""

    kind: str
    text: str


class Stock(_Message, frozen=True):
    """The answer to TakeStock: every snapshot that this agent could write, of its own slots and of its replicas."""

    version: int
    snapshots: dict[int, tuple[int, ...]]  # rank -> generations


class SnapshotWritten(_Message, frozen=True):
    """A rank's snapshot is in its file, and the file on the medium."""

    attempt: int
    rank: int
    file: DurableFile


class GenerationWhole(_Message, frozen=True):
    """The manifest is written: the generation is there. `removed` are the folders of older ones that were removed for it."""

    attempt: int
    removed: tuple[str, ...] = ()


class WriteFailed(_Message, frozen=True):
    """A snapshot, or the manifest (`rank` is None), was not written. `why`: the file system refused ("medium"), the copy in memory is
    damaged ("damaged"), or it is not here any more ("gone"), since training went on before it could be taken."""

    attempt: int
    rank: int | None
    why: Literal["medium", "damaged", "gone"]
    text: str


class Loaded(_Message, frozen=True):
    """The answer to Load: the slots are filled from the files, each checked; or `refusal` says which was not, and why. `unseen`: there
    is no such generation where this node looks."""

    version: int
    folder: str
    refusal: str = ""
    unseen: bool = False


# ---- coordinator to agent


class Welcome(_Message, frozen=True):
    """Joined. The agent ends itself when it has not reached the coordinator for `lease_s`."""

    lease_s: float
    heartbeat_interval_s: float


class Refused(_Message, frozen=True):
    """Not let in, or not any more; the agent ends its workers and itself."""

    reason: str


class Load(_Message, frozen=True):
    """Before the first membership: fill the slots of these ranks from the durable generation `root`/`folder`."""

    version: int  # of the membership to come
    root: str
    folder: str
    ranks: dict[int, int]  # worker -> rank; a worker that is not in it has none


class Start(_Message, frozen=True):
    """The first membership. `generation`: what the slots were filled with (Load); None: training begins as Megatron does."""

    membership: Membership
    store: str
    generation: int | None = None


class Halt(_Message, frozen=True):
    """Membership `version` is over. `lost` are the ranks whose process is known to be gone: what is waited for there never comes."""

    version: int
    reason: str
    lost: tuple[int, ...] = ()


class Assign(_Message, frozen=True):
    """Workers that are warm and have no state take these ranks: a spare's, sent at the halt, so that they build while the survivors
    unwind; or one that its agent has started again, once it is warm."""

    version: int  # of the membership to come
    ranks: dict[int, int]  # worker -> rank
    world_size: int


class Respawn(_Message, frozen=True):
    """Start this worker again, ending what is left of it first. Follows the halt; its slots stay, and it says when it is warm."""

    worker: int
    reason: str


class Resume(_Message, frozen=True):
    """The plan of a recovery: go on under `membership` from `generation`.

    `sources[rank]` are the agents that have the rank's snapshot, to be tried in this order; ranks that use their own slots are not
    in it. `replaced` are the ranks whose process is new: none of the groups that it is in can be kept.
    """

    membership: Membership
    generation: int
    store: str
    sources: dict[int, tuple[Source, ...]]
    redo_sections: bool
    replaced: tuple[int, ...] = ()


class Commit(_Message, frozen=True):
    """Every snapshot and every replica of `generation` is complete."""

    generation: int


class Void(_Message, frozen=True):
    """`generation` will never be committed, since some rank has skipped it: its slots are free."""

    generation: int


class SendWhole(_Message, frozen=True):
    """Ranks that should have the same payload do not: send payloads too, from the next generation on."""

    reason: str


class TakeStock(_Message, frozen=True):
    """The last rung: say what there is to write (Stock)."""

    version: int


class WriteSnapshots(_Message, frozen=True):
    """Write these ranks' snapshots of `generation` into `root`/`folder`, each a file.

    `training`: they are wanted as soon as they are complete, from a worker's own slots, while training goes on; else they are here.
    """

    attempt: int
    generation: int
    root: str
    folder: str
    ranks: tuple[int, ...]
    training: bool


class WriteManifest(_Message, frozen=True):
    """Every file of `root`/`folder` is written: see that all are there, write the manifest, then remove what is older than the newest
    `keep` whole generations."""

    attempt: int
    generation: int
    root: str
    folder: str
    shape: dict[str, int]
    files: tuple[DurableFile, ...]  # of rank 0, 1, …
    keep: int


class Arm(_Message, frozen=True):
    """Cause a fault."""

    injection: Injection


class Alive(_Message, frozen=True):
    """The coordinator lives. The answer to every heartbeat."""


class Stop(_Message, frozen=True):
    """The job is over: end the workers and yourself."""

    code: int
    reason: str


FromAgent = (
    Join | Rejoin | WorkerReady | Heartbeat | Acknowledged | Skipped | CopyDamaged | StepDone | WorkerError | WorkerLost | HaltReport
    | ReplicaReport | Restored | FirstStep | Finished | Unhealthy | HealthyAgain | Note | Stock | SnapshotWritten | GenerationWhole
    | WriteFailed | Loaded
)
FromCoordinator = (
    Welcome | Refused | Load | Start | Halt | Assign | Respawn | Resume | Commit | Void | SendWhole | TakeStock | WriteSnapshots
    | WriteManifest | Arm | Alive | Stop
)


# ---- what only the coordinator's own service tells the core


class AgentLost(_Message, frozen=True):
    """The connection of an agent closed."""

    evidence: str
    misbehaved: bool = False  # it was closed here, for what had come


class Inject(_Message, frozen=True):
    """A user asks for a fault."""

    injection: Injection


class SaveWanted(_Message, frozen=True):
    """A user asks for a durable generation."""


class Release(_Message, frozen=True):
    """A user lets a node out of quarantine."""

    node: str


Event = FromAgent | AgentLost | Inject | SaveWanted | Release
