"""Python face of the compiled engine: copy queues, checksum, words in shared memory, whole amounts through sockets,
rendezvous servers.

All but `referrers` takes addresses and lengths as integers and releases Python's lock while it works. _engine.pyi says what each
function promises, csrc/ how.
"""

from deadpool_ext._engine import (
    CopyQueue,
    RendezvousServer,
    add_u64,
    crc32c,
    crc32c_combine,
    crc32c_implementation,
    crc32c_portable,
    cuda_unavailable_reason,
    host_register,
    host_unregister,
    load_u64,
    memcpy,
    open_sockets,
    prefault,
    recv_all,
    referrers,
    send_all,
    send_summed,
    store_u64,
    wait_u64_at_least,
)

__all__ = [
    "CopyQueue",
    "RendezvousServer",
    "add_u64",
    "crc32c",
    "crc32c_combine",
    "crc32c_implementation",
    "crc32c_portable",
    "cuda_unavailable_reason",
    "host_register",
    "host_unregister",
    "load_u64",
    "memcpy",
    "open_sockets",
    "prefault",
    "recv_all",
    "referrers",
    "send_all",
    "send_summed",
    "store_u64",
    "wait_u64_at_least",
]
