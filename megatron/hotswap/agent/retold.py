"""What an agent tells a coordinator that has just come: what it has said and was perhaps not heard, as far as it still matters.

A coordinator that is lost takes along what it has heard and not recorded. What is decided in a recovery is asked again anyway, so the
little that remains is kept here: who is warm, which processes are gone or through, errors, what is wrong with the node, and of each rank
the newest generations that are at its holders. Steps are kept until they are committed: their lines are written only then.
"""

from __future__ import annotations

from collections import deque

from ..control import messages as m

#: Steps whose lines wait: more than any job has between two commits.
_STEPS_MAX = 10_000
#: Of each rank. One that has heard of a commit is a generation ahead of those who have not: they wait for the one before.
_GENERATIONS = 2


class Retold:
    """One per agent."""

    def __init__(self) -> None:
        self._said: dict[tuple[type, int | str], m.FromAgent] = {}
        self._steps: dict[int, m.StepDone] = {}
        self._acknowledged: dict[int, deque[m.Acknowledged]] = {}

    def said(self, message: m.FromAgent) -> None:
        """The agent tells it to the coordinator now, if there is one."""
        if isinstance(message, m.StepDone):
            self._steps[message.record.step] = message
            while len(self._steps) > _STEPS_MAX:
                del self._steps[min(self._steps)]
        elif isinstance(message, m.Acknowledged):
            self._acknowledged.setdefault(message.rank, deque(maxlen=_GENERATIONS)).append(message)
        elif isinstance(message, m.Skipped | m.WorkerError):
            self._put(message, message.rank)
        elif isinstance(message, m.WorkerReady | m.WorkerLost | m.Finished):
            self._put(message, message.worker)
        elif isinstance(message, m.Unhealthy) and message.fatal:
            self._put(message, message.source)
        elif isinstance(message, m.HealthyAgain):
            self._said.pop((m.Unhealthy, message.source), None)

    def _put(self, message: m.FromAgent, subject: int | str) -> None:
        self._said.pop((type(message), subject), None)
        self._said[type(message), subject] = message

    def committed(self, generation: int) -> None:
        """The coordinator has written these steps."""
        self._steps = {step: said for step, said in self._steps.items() if step > generation}

    def halted(self) -> None:
        """The membership in which ranks have had errors is over."""
        self._said = {key: said for key, said in self._said.items() if key[0] is not m.WorkerError}

    def resumed(self, generation: int) -> None:
        """The job goes on from this generation: what came after it is run again."""
        self.halted()
        self._steps = {step: said for step, said in self._steps.items() if step <= generation}

    def given(self, worker: int) -> None:
        """It has a rank: its rendezvous store is used."""
        self._said.pop((m.WorkerReady, worker), None)

    def started_again(self, worker: int) -> None:
        """What was said of the process before it is over."""
        for kind in (m.WorkerReady, m.WorkerLost, m.Finished):
            self._said.pop((kind, worker), None)

    def messages(self) -> list[m.FromAgent]:
        """All of it."""
        acknowledged = [said for of_rank in self._acknowledged.values() for said in of_rank]
        return [*self._steps.values(), *acknowledged, *self._said.values()]
