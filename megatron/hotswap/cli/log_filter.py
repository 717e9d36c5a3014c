"""Megatron's log once, out of the logs of all ranks. Pure: lines in, lines to show out.

Every worker writes its own file. What Megatron prints on one rank only is in one of them, warnings are in all of them,
and after a swap the spare prints its own start once more. So: a training step is shown once by its number, anything
else once by its text (with dates and measured seconds left out of the comparison), and what is known to help nobody
stays in the files.
"""

from __future__ import annotations

import re

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_VALIDATION = re.compile(r"\bvalidation loss at\b")
_RULE = re.compile(r"^\s*[-=*]*\s*$")
_ARGUMENTS_BEGIN = re.compile(r"^-+ arguments -+$")
_ARGUMENTS_END = re.compile(r"^-+ end of arguments -+$")
_PYTHON_WARNING = re.compile(r"^\S.*:\d+: \w*Warning: ")
_TRACEBACK = re.compile(r"^(\[rank\d+\]:\s*)?Traceback \(most recent call last\):")
_CONTINUED = re.compile(r"^(\t| {2,})")
_BETWEEN_TRACEBACKS = re.compile(r"^(The above exception was|During handling of the above)")
#: Lines whose indented lines below belong to them and stay in the file with them.
_BLOCK_HEADS = re.compile(r"^(INFO:|Params for bucket )")
_NOISE = re.compile(
    "|".join(
        (
            r"one_logger",
            r"^DEBUG:",
            r"^(\[rank\d+\]:)?\[[IWE]\d{4} ",  # torch's C++ log
            r"^WARNING:megatron\.core\.rerun_state_machine:(RerunStateMachine init|Result valid|Setting Rerun)",
            r"^WARNING:megatron\.core\.models\.gpt\.gpt_model:GPTModel IS DEPRECATED",
            r"^Overwriting rerun_state_machine\.",
            r"^deadpool: worker ends with code",
            r"^\[(after|before) .*\] datetime:",
            r"^\[Rank \d+\] \(.*\) memory \(MB\)",
            r"^compute_activation_memory",
        )
    )
)
#: Left out of the comparison: dates, times and measured fractions, and the name of the rank that speaks.
_VARYING = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(\.\d+)?|\d+\.\d+|\[[Rr]ank ?\d+\]")


class LogFilter:
    """One per job. `take` says what to show of a line."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._seen: set[str] = set()
        self._block: dict[str, str] = {}  # file -> kind of the block that its last line stands in

    def take(self, source: str, line: str) -> str | None:
        """The line as it is to be shown, or None.

        Args:
            source: the file it comes from.
            line: without its line end.
        """
        line = line.rstrip()
        if self._is_noise(source, line) and not self._verbose:
            return None
        iteration = _ITERATION.search(line)
        if iteration:
            return self._once(f"iteration {iteration[1]}", line)
        if _RULE.match(line):
            return None
        return self._once(line if _VALIDATION.search(line) else _VARYING.sub("#", line), line)

    def _once(self, key: str, line: str) -> str | None:
        if key in self._seen:
            return None
        self._seen.add(key)
        return line

    def _is_noise(self, source: str, line: str) -> bool:
        block = self._block.get(source)
        if block == "arguments":
            if _ARGUMENTS_END.match(line):
                del self._block[source]
            return True
        if block is not None and (_CONTINUED.match(line) or not line):
            return True
        if block == "traceback" and not _BETWEEN_TRACEBACKS.match(line) and not _TRACEBACK.match(line):
            del self._block[source]  # the line that names the exception
            return True
        begun = self._begun(line)
        if begun is not None:
            self._block[source] = begun
            return True
        self._block.pop(source, None)
        return bool(_NOISE.search(line) or _BETWEEN_TRACEBACKS.match(line))

    @staticmethod
    def _begun(line: str) -> str | None:
        if _ARGUMENTS_BEGIN.match(line):
            return "arguments"
        if _TRACEBACK.match(line):
            return "traceback"
        if _PYTHON_WARNING.match(line):
            return "warning"
        return "lines" if _BLOCK_HEADS.match(line) else None
