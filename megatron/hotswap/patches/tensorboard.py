"""Hot-swap's scalars, through the writer that Megatron makes where --tensorboard-dir is given: on its last rank, which logs."""

from __future__ import annotations

from typing import Any

#: Below this name TensorBoard groups them.
GROUP = "hot-swap"


class Scalars:
    """What one rank has to say between two logs. Every rank counts recoveries, since a spare may be the next that logs: the count
    travels in the snapshot's metadata."""

    def __init__(self) -> None:
        self.recoveries = 0
        self._recovery_s = 0.0  # since the last write
        self._recovered = False

    def recovered(self, seconds: float) -> None:
        """This rank is through a recovery; it took so long from its own exception, or assignment, on."""
        self.recoveries += 1
        self._recovery_s += seconds
        self._recovered = True

    def write(self, writer: Any, iteration: int, exposed_stall_s: float | None, committed: int) -> None:
        """After Megatron has written its own for this iteration. `exposed_stall_s`: None where the step is not this rank's to tell."""
        if writer is None:
            return
        if exposed_stall_s is not None:
            writer.add_scalar(f"{GROUP}/exposed-stall-seconds", exposed_stall_s, iteration)
        if committed >= 0:
            writer.add_scalar(f"{GROUP}/committed-generation", committed, iteration)
        writer.add_scalar(f"{GROUP}/recoveries", self.recoveries, iteration)
        if self._recovered:
            writer.add_scalar(f"{GROUP}/recovery-seconds", self._recovery_s, iteration)
            self._recovery_s, self._recovered = 0.0, False
