"""An agent's transport in a process of its own, to be killed: `holder_process.py mpi|nixl`. Says its address, then what it holds."""

from __future__ import annotations

import asyncio
import sys

from transport_pair import RUN, SIDE, TOKEN

from megatron.hotswap.replication.transfer import ReplicaStore


async def main() -> None:
    store = ReplicaStore(RUN, lambda wanted: None)
    transport = SIDE[sys.argv[1]](TOKEN, "127.0.0.1")
    print(await transport.serve(store), flush=True)
    said = {}
    while True:
        await asyncio.sleep(0.01)
        if store.generations() != said:
            said = store.generations()
            print(said, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
