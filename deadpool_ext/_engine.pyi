from typing import Literal, final

import numpy as np
import numpy.typing as npt

@final
class CopyQueue:
    """Copy jobs, worked off in order by one thread of the engine.

    device None copies host memory; an index copies between that CUDA device and page-locked host memory. Works only in
    the process that made it. A job that fails ends the queue: its ticket and all later ones raise RuntimeError from
    wait(). At Python's exit every queue is closed, which waits for the job that runs.
    """

    def __init__(self, device: int | None = None) -> None: ...
    def submit(
        self,
        src: npt.NDArray[np.uint64],
        dst: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        flag_address: int,
        flag_value: int,
        stream: int | None = None,
        progress_address: int = 0,
    ) -> int:
        """Queue copies of lengths[i] bytes from address src[i] to dst[i]; returns a ticket at once.

        The arrays are copied and may be reused. The memory they name, and that of the flag, must stay mapped until the
        job is done: keep its owners alive. Then flag_value is stored at flag_address (8 bytes, aligned; release).
        stream is for CUDA queues and needed there: the copies follow the work that it holds now
        (torch.cuda.current_stream().cuda_stream).

        progress_address (0: none) names a word of 8 bytes that tells how much is in place while the job runs, for who
        sends it on: dst must ascend then, and after each 8 MiB (host memory) or 64 MiB (CUDA), and at the end, the word
        is set (release) to p such that every byte of an entry below dst[0] + p is in place. Gaps between entries count,
        what follows the last entry does not. Set it to 0 before.
        """

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """True once the ticket's job is done, False at the timeout; RuntimeError if it failed or close() dropped it."""

    def pending(self) -> int:
        """Jobs not yet done, the running one included."""

    def bytes_copied(self) -> int:
        """Bytes copied so far; moves while a job of host memory runs, and after each job of a CUDA device."""

    def close(self, timeout_s: float = ...) -> bool:
        """Finish the running job, drop those not begun, end the thread. False if timeout_s passed first: call again."""

def crc32c(address: int, length: int, seed: int = 0) -> int:
    """CRC32C, as in iSCSI. seed is the checksum of the bytes before: crc32c(b, nb, crc32c(a, na)) is that of a + b."""

def crc32c_portable(address: int, length: int, seed: int = 0) -> int:
    """crc32c without the processor's instructions for it."""

def crc32c_combine(crc1: int, crc2: int, len2: int) -> int:
    """Checksum of a + b, from those of a and b and the length of b."""

def crc32c_implementation() -> str:
    """What crc32c runs on this processor: 'sse4.2+pclmul', 'armv8+pmull' or 'portable'."""

def send_all(fd: int, address: int, length: int, head: bytes = b"") -> None:
    """Send head, then length bytes from address, on a connected stream socket; OSError where it breaks.

    Waits as long as the peer does not read. To end it, shut the socket down from another thread; close it only after.
    """

def send_summed(fd: int, address: int, length: int, head: bytes = b"") -> int:
    """send_all that returns the CRC32C of the bytes (not the head), taken piece by piece while they are in cache."""

def recv_all(fd: int, address: int, length: int, seed: int = 0) -> int:
    """Receive length bytes to address; returns their CRC32C, going on from seed. OSError where the socket breaks, a
    ConnectionResetError where the peer closes before the last byte. To end it, shut the socket down."""

def open_sockets() -> frozenset[tuple[int, int]]:
    """Every socket of this process, connected or not: descriptor, and inode, which tells it from one that had the number before."""

@final
class RendezvousServer:
    """Serves keys and values to who shows the secret, from a thread of its own, until it is dropped; csrc/rendezvous.hpp has the
    protocol. address is numeric; RuntimeError where it cannot be listened on."""

    def __init__(self, address: str, secret: str) -> None: ...
    @property
    def port(self) -> int: ...

def memcpy(dst: int, src: int, length: int) -> None:
    """Copy length bytes between ranges that do not overlap."""

def prefault(address: int, length: int) -> None:
    """Make every page of a writable range present; contents stay. RuntimeError where there is no memory for them."""

def load_u64(address: int) -> int:
    """The word at address (acquire). All words are 8 bytes, aligned."""

def store_u64(address: int, value: int) -> None:
    """Set the word at address (release)."""

def add_u64(address: int, value: int) -> int:
    """Add to the word at address, modulo 2**64; returns its value after that."""

def wait_u64_at_least(
    address: int, value: int, timeout_s: float, stop_address: int = 0, stop_value: int = 0
) -> Literal[0, 1, 2]:
    """1 once *address >= value, 2 once *stop_address >= stop_value (stop_address 0: no stop), 0 at the timeout.

    Where both hold the answer is 1.
    """

def host_register(address: int, length: int, device: int | None = None) -> None:
    """Page-lock mapped host memory for CUDA copies; device None: by the calling thread's current device."""

def host_unregister(address: int, device: int | None = None) -> None:
    """Undo host_register; call it before the mapping goes."""

def cuda_unavailable_reason() -> str | None:
    """None where CopyQueue(device) can work, else why not. Starts the CUDA driver: not before a fork."""

def referrers(objects: tuple[object, ...]) -> list[object]:
    """The holders of references to any of these objects, each once: what gc.get_referrers finds, in one pass whatever their number,
    and dictionaries and tuples that the collector does not track, if an object that it does track holds them. Holds Python's lock."""
