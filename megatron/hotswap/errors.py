"""What can go wrong, by whose doing: the user's, a peer's or the machine's, or our own."""


class HotSwapError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(HotSwapError):
    """A user's mistake: the message states the rule, the actual values and the next action."""


class PeerFault(HotSwapError):
    """Another process or machine failed or sent what it must not send."""


class Malformed(PeerFault):
    """Bytes that came are no message: of another version, damaged, or noise."""


class SnapshotMismatch(HotSwapError):
    """A snapshot is not the one that was asked for (run, rank, generation, layout or checksum): the next source is tried."""


class Fenced(HotSwapError):
    """This process belongs to a membership that is over; it must end itself without touching anything."""


class Deposed(HotSwapError):
    """This coordinator does not lead the job any more: another one does, and it must not decide anything."""


class InjectedFault(HotSwapError):
    """Raised on purpose, to see what follows: it stands for an error of the user's program."""


class Halted(RuntimeError):
    """The membership that the training thread was working in is over.

    A RuntimeError, as the errors of a broken collective are, so that code which unwinds for one unwinds for the other.
    """
