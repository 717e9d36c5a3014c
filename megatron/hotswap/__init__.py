"""Hot-swap for Megatron-LM: a training job loses a node and does not notice.

One training step. The worker runs Megatron's own train_step. Before the optimizer changes anything, the *fence* waits until the
snapshot of the last step is complete in host memory and acknowledged by its holder on another node (`worker/session.py`). After
the step, `snapshot/engine.py` begins to copy the optimizer shard into the other slot, and the call returns at once; behind the
next forward and backward pass the agent (`agent/`) checksums the slot and sends it to the holder (`replication/`).

One recovery. An agent's connection closes or its lease runs out; the coordinator's pure core (`control/`) gives a verdict, ends
the membership and orders a halt. In every worker a monitor thread gets the training thread out of its collective
(`worker/abort.py`); the exception unwinds to the recovery loop around train_step (`worker/loop.py`), which reports what
generations it holds. From the reports `recovery/plan.py` picks the newest generation that every rank has somewhere. Survivors
and the spare, which has meanwhile built model and optimizer for its new rank (`worker/spare.py`), rebuild the process groups and
replace every reference to an old one (`topology/groups.py`), restore the generation (`recovery/execute.py`) and run the
interrupted step again: same samples, same random numbers, same bits.

Megatron is touched in `patches/` and `device/` only. Imports point downwards only; `control/`, `recovery/plan.py`,
`replication/placement.py`, `snapshot/layout.py` and `topology/grid.py` are pure: no torch, sockets, threads, clocks or random.
"""
