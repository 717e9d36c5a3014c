"""Many seeds: every scheme on the same failures, means with confidence intervals, and the questions of who plans a job. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev

from ..errors import UsageError
from .engine import Outcome, run
from .failures import Chance, Trace
from .inputs import ASSUMED, Inputs
from .pools import Copies
from .schemes import CHECKPOINT, CHECKPOINT_BEST, HOT_SWAP, Scheme, all_schemes, scheme_of
from .theory import daly_interval, wait_probability, young_interval

#: Makes the random source of a seed.
Chances = Callable[[int], Chance]
CONFIDENCE = 0.95
_NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half width of its 95 % confidence interval (None with one seed)."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, by the expansion in 1 / freedom (too small by 1 % at 3, 4 % at 2, 26 % at 1)."""
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom ** (k + 1)) for k, term in enumerate(terms))


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value a seed."""
    if len(values) < 2:
        return Estimate(fmean(values), None)
    return Estimate(fmean(values), student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share; (0, 1) where nothing was seen."""
    if of == 0:
        return 0.0, 1.0
    z, p = _NORMAL, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return (max(0.0, middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of))


@dataclass(frozen=True)
class Result:
    """One scheme over all seeds."""

    scheme: Scheme
    outcomes: tuple[Outcome, ...]

    def of(self, value: Callable[[Outcome], float]) -> Estimate:
        return estimate([value(outcome) for outcome in self.outcomes])

    @property
    def goodput(self) -> Estimate:
        return self.of(lambda o: o.goodput)

    @property
    def unfinished(self) -> int:
        return sum(not outcome.finished for outcome in self.outcomes)


def simulate(inputs: Inputs, schemes: Sequence[Scheme], seeds: Sequence[int], chances: Chances) -> list[Result]:
    """Every scheme on the failures of every seed."""
    copies = Copies(inputs) if any(s.memory_interval_steps is not None for s in schemes) else None
    outcomes: list[list[Outcome]] = [[] for _ in schemes]
    for seed in seeds:
        trace = Trace(inputs, chances(seed))
        for of_scheme, scheme in zip(outcomes, schemes, strict=True):
            of_scheme.append(run(inputs, scheme, trace, copies))
    return [Result(scheme, tuple(found)) for scheme, found in zip(schemes, outcomes, strict=True)]


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate | None:
    """Sum over sum, one pair a seed, with the interval of the jackknife (leave one seed out); None where nothing is below."""
    total, base = math.fsum(above), math.fsum(below)
    n = len(above)
    rest = [(total - a, base - b) for a, b in zip(above, below, strict=True)]
    if base <= 0.0:
        return None
    if n < 2 or min(b for _, b in rest) <= 0.0:  # one seed has all there is below: no interval
        return Estimate(total / base, None)
    without = [a / b for a, b in rest]
    middle = fmean(without)
    spread = math.sqrt((n - 1) / n * math.fsum((w - middle) ** 2 for w in without))
    return Estimate(total / base, student_t(n - 1) * spread)


def resume_share(result: Result, reference: Result) -> Estimate | None:
    """Time to resume over the reference's, of all seeds together."""
    return ratio([o.resume_s for o in result.outcomes], [o.resume_s for o in reference.outcomes])


def resume_times(result: Result, reference: Result) -> Estimate | None:
    """The same the other way round: how many times less."""
    return resume_share(reference, result)


# -- which interval


@dataclass(frozen=True)
class Interval:
    """A candidate. `worse`: by how much its goodput is below the best one's, seed by seed."""

    seconds: float
    steps: int
    goodput: Estimate
    worse: Estimate


@dataclass(frozen=True)
class IntervalAdvice:
    """Seconds of training between checkpoints: two formulas, and what the simulation finds."""

    young_s: float
    daly_s: float
    candidates: tuple[Interval, ...]

    @property
    def best(self) -> Interval:
        return max(self.candidates, key=lambda c: c.goodput.mean)

    @property
    def as_good(self) -> tuple[float, float]:
        """From the shortest to the longest interval that these seeds cannot tell from the best one."""
        same = [c.seconds for c in self.candidates if c.worse.low <= 0.0]
        return min(same), max(same)


def search_interval(inputs: Inputs, seeds: Sequence[int], chances: Chances, halvings: int = 4) -> IntervalAdvice | None:
    """Checkpoint-restart at Daly's interval and at powers of the square root of 2 around it; None where nothing fails."""
    daly = daly_interval(inputs.save_s, inputs.job_mtbf_s)
    if math.isinf(daly):
        return None
    wanted = [daly * 2 ** (k / 2) for k in range(-halvings, halvings + 1)]
    steps = sorted({inputs.steps_of(max(seconds, inputs.step_s)) for seconds in wanted})
    base = scheme_of(inputs, CHECKPOINT)
    results = simulate(inputs, [replace(base, durable_steps=n) for n in steps], seeds, chances)
    best = max(results, key=lambda r: r.goodput.mean)
    candidates = tuple(
        Interval(
            result.scheme.durable_steps * inputs.step_s,
            result.scheme.durable_steps,
            result.goodput,
            estimate([b.goodput - o.goodput for b, o in zip(best.outcomes, result.outcomes, strict=True)]),
        )
        for result in results
    )
    return IntervalAdvice(young_interval(inputs.save_s, inputs.job_mtbf_s), daly, candidates)


# -- how many spares


def spares_needed(inputs: Inputs, at_most: float) -> int | None:
    """The fewest spares with which at most this share of the failures has to wait for one, by theory.wait_probability.

    None where as many spares as nodes would not do.

    Raises:
        UsageError: the share is none.
    """
    if not 0.0 < at_most < 1.0:
        raise UsageError(f"the share of failures that wait for a spare must lie between 0 and 1, got {at_most}")

    def enough(spares: int) -> bool:
        return wait_probability(replace(inputs, spares=spares)) <= at_most

    if inputs.group_share:
        # One by one: a spare too few for a group only takes single failures off the nodes that train, so the share of groups rises.
        return next((spares for spares in range(inputs.nodes + 1) if enough(spares)), None)
    high = 0
    while not enough(high):
        if high >= inputs.nodes:
            return None
        high = min(max(1, 2 * high), inputs.nodes)
    low = high // 2  # what is enough stays enough
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


# -- what matters


@dataclass(frozen=True)
class Swing:
    """What one input does alone. Ratios: hot swap's time to resume over checkpoint-restart's. Gains: goodput above its best interval's."""

    name: str
    origin: str
    low: float
    high: float
    ratios: tuple[Estimate | None, Estimate | None]
    gains: tuple[Estimate, Estimate]

    @property
    def width(self) -> float:
        """By how much the gain moves."""
        return abs(self.gains[1].mean - self.gains[0].mean)


#: Inputs that are halved and doubled. Whole numbers stay whole.
_SCALED = (
    "nodes",
    "step_s",
    "node_mtbf_s",
    "repair_s",
    "group_nodes",
    "save_s",
    "load_s",
    "interval_s",
    "safety_interval_s",
    "restart_s",
    "swap_s",
    "steps",
)


def _variants(inputs: Inputs) -> list[tuple[str, float, float]]:
    found: list[tuple[str, float, float]] = []
    for name in _SCALED:
        value = getattr(inputs, name)
        value = inputs.derived(name) if value is None else value
        if math.isfinite(value) and value > 0 and (name != "group_nodes" or inputs.group_share):
            found.append((name, max(1, value // 2) if isinstance(value, int) else value / 2, 2 * value))
    found.append(("spares", inputs.spares // 2, 2 * max(1, inputs.spares)))
    found.append(("group_share", 0.0, 2 * inputs.group_share if inputs.group_share else 0.1))
    found.append(("stall_s", 0.0, 2 * inputs.stall_s if inputs.stall_s else 0.01 * inputs.step_s))
    found.append(("commit_s", 0.0, 2 * inputs.commit_s if inputs.commit_s else 0.5 * inputs.step_s))
    return found


def answer(inputs: Inputs, seeds: Sequence[int], chances: Chances) -> tuple[Estimate | None, Estimate]:
    """The two figures of a `Swing`; the gain seed by seed."""
    schemes = [scheme_of(inputs, name) for name in (CHECKPOINT, CHECKPOINT_BEST, HOT_SWAP)]
    given, best, swap = simulate(inputs, schemes, seeds, chances)
    return _answer(given, best, swap)


def _answer(given: Result, best: Result, swap: Result) -> tuple[Estimate | None, Estimate]:
    gains = [s.goodput - b.goodput for s, b in zip(swap.outcomes, best.outcomes, strict=True)]
    return resume_share(swap, given), estimate(gains)


def sensitivity(inputs: Inputs, seeds: Sequence[int], chances: Chances, origins: dict[str, str]) -> list[Swing]:
    """Each input halved and doubled alone (zero ones: to a small value), what matters most first. Values that make no job are left out."""
    swings = []
    for name, low, high in _variants(inputs):
        try:
            changed = [replace(inputs, **{name: value}) for value in (low, high)]  # type: ignore[arg-type]
            (a, gain_a), (b, gain_b) = (answer(each, seeds, chances) for each in changed)
        except UsageError:
            continue
        swings.append(Swing(name, origins.get(name, ASSUMED), low, high, (a, b), (gain_a, gain_b)))
    return sorted(swings, key=lambda s: -s.width)


# -- all of it


@dataclass(frozen=True)
class Study:
    """What `deadpool simulate` finds."""

    inputs: Inputs
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    interval: IntervalAdvice | None
    spares_for: float
    spares_needed: int | None  # None: no number of spares would do
    wait_probability: float
    swings: tuple[Swing, ...]

    def result(self, name: str) -> Result:
        return next(r for r in self.results if r.scheme.name == name)

    def per_node(self, result: Result) -> Estimate:
        """Goodput over all nodes that the scheme holds, spares too."""
        share = self.inputs.nodes / self.inputs.allocated if result.scheme.uses_spares else 1.0
        goodput = result.goodput
        return Estimate(goodput.mean * share, None if goodput.half is None else goodput.half * share)

    @property
    def interruptions(self) -> int:
        """Of the hot-swap jobs of all seeds."""
        return sum(o.interruptions for o in self.result(HOT_SWAP).outcomes)

    @property
    def waited(self) -> int:
        """Of them those that found too few spares."""
        return sum(o.waits for o in self.result(HOT_SWAP).outcomes)

    @property
    def waited_interval(self) -> tuple[float, float]:
        return share_interval(self.waited, self.interruptions)


def answer_of(found: Study) -> tuple[Estimate | None, Estimate]:
    """The two figures of a `Swing`, with the inputs as they are."""
    return _answer(*(found.result(name) for name in (CHECKPOINT, CHECKPOINT_BEST, HOT_SWAP)))


def study(inputs: Inputs, seeds: Sequence[int], chances: Chances, spares_for: float, origins: dict[str, str] | None) -> Study:
    """Everything.

    Args:
        spares_for: the share of failures that may wait for a spare.
        origins: where each input comes from; None: no sensitivity.

    Raises:
        UsageError: there is no seed, a share is none, or replicas cannot be placed.
    """
    if not seeds:
        raise UsageError("a simulation needs at least one seed, got none; give --seeds 20")
    return Study(
        inputs,
        tuple(seeds),
        tuple(simulate(inputs, all_schemes(inputs), seeds, chances)),
        search_interval(inputs, seeds, chances),
        spares_for,
        spares_needed(inputs, spares_for),
        wait_probability(inputs),
        () if origins is None else tuple(sensitivity(inputs, seeds, chances, origins)),
    )
