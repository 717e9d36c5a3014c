"""control/decided.py: what another coordinator must know is recorded whenever it changes, and steps do not change it."""

from pathlib import Path

import msgspec
import pytest
from story import Story

from megatron.hotswap.control import decided

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Watched(Story):
    """Looks whether that changes without the revision, by which the service sees it."""

    def _known(self):
        # The newest step is recorded along with the rest; agents tell newer ones again.
        return decided.encode(msgspec.structs.replace(self.control.decided, newest_step=0))

    def _command(self, line):
        if line.startswith(("job", "coordinator-lost")):  # another core
            return super()._command(line)
        before, revision, strikes = self._known(), self.control.revision, self.control.loop.strikes
        decisions = super()._command(line)
        assert self.control.revision != revision or self._known() == before, line
        if line.startswith(("stepped", "acknowledged")) and not strikes:
            assert self.control.revision == revision, line
        return decisions


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_what_is_to_be_recorded_changes_with_its_revision(path):
    Watched().play(path.read_text())
