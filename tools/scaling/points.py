"""The points of the sweeps, as data.

Published (megatron/hotswap/simulate/published.py and the abstract of arXiv:2607.01646): the ranges, 8 to 512 A100 and up to 64 GH200,
GPTs of 0.6 to 65 billion parameters. Not known here: which model ran on how many GPUs, with which TP, PP, DP, ZeRO stage and batch. So
every grid below is our own choice, and says so; where one becomes known, its point gets `PUBLISHED`, and its source stands beside it.
They are those of megatron/hotswap/sizing/paper.py, but where these go beyond the published ranges.

Two series for each machine. `weak`: the model grows with the GPUs, so that a GPU has about as many parameters at every point, and the
batch stays; `gpus`: one model, and the batch grows with its data-parallel replicas. A point may be in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.hotswap.errors import UsageError
from megatron.hotswap.sizing.paper import MODELS, SEQUENCE, Model

PUBLISHED, OWN_CHOICE = "published", "own choice"
WEAK, GPUS = "weak", "gpus"
VOCABULARY = 50_257  # GPT-2's; Megatron pads it to a multiple of 128 x TP

#: For CPUs, where the whole chain is tried: nothing is learnt from it about GPUs.
_TINY = (
    Model("tiny", 2, 32, 4, 8, "ours, to try the chain on CPUs"),
    Model("small", 4, 64, 4, 8, "ours, to try the chain on CPUs"),
)
SHAPES = {model.name: model for model in (*MODELS, *_TINY)}
_TINY_SEQUENCE, _TINY_VOCABULARY = 32, 128


@dataclass(frozen=True)
class Point:
    """A job of the study. `gpus` are ranks that train (on CPUs: processes); spares come on top.

    Args:
        machine: a key of sites.SITES.
        zero_stage: 1 is Megatron's distributed optimizer, 0 is without; 2 and 3 are not covered by hot-swap.
        series: those that it belongs to.
        source: of the grid and the batch, `PUBLISHED` or `OWN_CHOICE`.
    """

    machine: str
    model: str
    gpus: int
    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch: int  # sequences
    global_batch: int  # sequences a step
    series: tuple[str, ...]
    sequence: int = SEQUENCE  # tokens
    vocabulary: int = VOCABULARY
    source: str = OWN_CHOICE

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.model}-{self.gpus:04d}"

    @property
    def shape(self) -> Model:
        """Layers, width, heads."""
        return SHAPES[self.model]

    def grid(self) -> str:
        """`TP 4 x PP 2 x DP 16`."""
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"

    def check(self) -> None:
        """Refuse what is no job.

        Raises:
            UsageError: states the rule and the values.
        """
        if self.model not in SHAPES:
            raise UsageError(f"a model is one of {', '.join(SHAPES)}; got {self.model!r}")
        if self.source not in (PUBLISHED, OWN_CHOICE):
            raise UsageError(f"{self.name}: the source is {PUBLISHED!r} or {OWN_CHOICE!r}, got {self.source!r}")
        if self.zero_stage not in (0, 1):
            raise UsageError(
                f"{self.name}: ZeRO stage {self.zero_stage}: hot-swap covers 1 (--use-distributed-optimizer) and 0 (without it); choose one"
            )
        if self.tensor * self.pipeline * self.data != self.gpus:
            raise UsageError(f"{self.name}: {self.grid()} has {self.tensor * self.pipeline * self.data} ranks, not {self.gpus}")


def _points(
    machine: str, rows: tuple[tuple[str, int, int, int, int, int, str], ...], sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> tuple[Point, ...]:
    """Rows of (model, TP, PP, DP, micro batch, global batch, series), all with ZeRO stage 1."""
    return tuple(
        Point(machine, model, tp * pp * dp, tp, pp, dp, 1, micro, batch, tuple(series.split()), sequence, vocabulary)
        for model, tp, pp, dp, micro, batch, series in rows
    )


#: Sweeps by their machine. All grids: our own choice.
SWEEPS: dict[str, tuple[Point, ...]] = {
    "perlmutter": _points(
        "perlmutter",
        (
            ("0.6B", 1, 1, 8, 2, 512, "weak"),
            ("1.3B", 1, 1, 16, 2, 512, "weak"),
            ("2.7B", 2, 1, 16, 2, 512, "weak"),
            ("6.7B", 4, 1, 8, 1, 256, "gpus"),
            ("6.7B", 4, 1, 16, 1, 512, "weak gpus"),
            ("6.7B", 4, 1, 32, 1, 1024, "gpus"),
            ("6.7B", 4, 1, 64, 1, 2048, "gpus"),
            ("6.7B", 4, 1, 128, 1, 4096, "gpus"),
            ("13B", 4, 2, 16, 1, 512, "weak"),
            ("30B", 4, 4, 16, 1, 512, "weak"),
            ("65B", 4, 8, 16, 1, 512, "weak"),
        ),
    ),
    "vista": _points(
        "vista",
        (
            ("0.6B", 1, 1, 4, 4, 512, "weak"),
            ("1.3B", 1, 1, 8, 4, 512, "weak"),
            ("2.7B", 1, 1, 8, 2, 256, "gpus"),
            ("2.7B", 1, 1, 16, 2, 512, "weak gpus"),
            ("2.7B", 1, 1, 32, 2, 1024, "gpus"),
            ("2.7B", 1, 1, 64, 2, 2048, "gpus"),
            ("6.7B", 1, 2, 16, 1, 512, "weak"),
            ("13B", 1, 4, 16, 1, 512, "weak"),
            ("30B", 1, 8, 8, 1, 512, "weak"),
            ("65B", 1, 16, 4, 1, 512, "weak"),
        ),
    ),
    "cpu": _points(
        "cpu",
        (
            ("tiny", 1, 1, 2, 2, 8, "weak gpus"),
            ("small", 1, 2, 2, 2, 8, "weak"),
        ),
        _TINY_SEQUENCE,
        _TINY_VOCABULARY,
    ),
}


def points_of(machine: str, only: list[str] | None = None) -> tuple[Point, ...]:
    """The points of a machine's sweep, or those named.

    Raises:
        UsageError: there is no such machine or point, and which there are.
    """
    if machine not in SWEEPS:
        raise UsageError(f"there is a sweep for {', '.join(SWEEPS)}; got --machine {machine}")
    return select(SWEEPS[machine], only)


def select(points: tuple[Point, ...], only: list[str] | None) -> tuple[Point, ...]:
    """Those named, in the order of the sweep; None: all.

    Raises:
        UsageError: a name is none of theirs.
    """
    names = [point.name for point in points]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise UsageError(f"this sweep has no point {', '.join(unknown)}; it has {', '.join(names)}")
    return tuple(point for point in points if not only or point.name in only)
