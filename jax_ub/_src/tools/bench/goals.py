"""Performance goals of the project, and which of them a benchmark run has reached."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.results import Result
from jax_ub._src.tools.bench.statistics import geomean

_FORWARD = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_SEVERAL = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound that a benchmark figure must satisfy, such as a speed-up over XLA of 1.3.

    It is checked separately for each op, variant, dtype, P and number of processes.

    Attributes:
        ops: the ops that the goal applies to.
        measure: a key of `_MEASURES`.
        bound: the value to reach.
        dtypes: the dtypes that it applies to; empty for all.
        ranks: the P that it applies to; empty for all.
        worst: whether every shape must reach the bound, not only the geometric mean.
        at_most: whether the bound is an upper bound.
        variants: the variants that it applies to; empty for all.
        processes: the numbers of processes that it applies to.
    """

    ops: tuple[str, ...]
    measure: str
    bound: float
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    worst: bool = False
    at_most: bool = False
    variants: tuple[str, ...] = ()
    processes: tuple[int, ...] = (1,)

    def concerns(self, result: Result) -> bool:
        """Returns whether the goal applies to the op, dtype and P of this result."""
        case = result.case
        return (
            case.op in self.ops
            and case.num_processes in self.processes
            and (not self.dtypes or case.dtype in self.dtypes)
            and (not self.ranks or case.num_ranks in self.ranks)
            and (not self.variants or case.variant in self.variants)
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The value that a benchmark run reached for one goal, and the goal's bound.

    The value summarizes all shapes with the same op, variant, dtype, P and number of
    processes. For a speed-up, `limit` is the value it would have if every call ran at
    the machine's peak FLOP/s.
    """

    op: str
    variant: str
    dtype: str
    num_ranks: int
    measure: str
    statistic: str
    value: float
    bound: float
    at_most: bool
    num_shapes: int
    num_processes: int = 1
    limit: float | None = None

    @property
    def reached(self) -> bool:
        """Returns whether the value satisfies the goal's bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def outcome(self) -> str:
        """Returns "reached", "NOT reached" or "beyond this machine", for tables.

        A goal is beyond this machine if even a call at peak FLOP/s would not reach it.
        """
        if self.reached:
            return "reached"
        beyond = self.limit is not None and self.limit < self.bound
        return "beyond this machine" if beyond else "NOT reached"


def _speed_up(result: Result, peers: Sequence[str]) -> float:
    return min(result.speedups[p].median for p in peers if p in result.speedups)


def _limit(result: Result, goal: Goal) -> float | None:
    """Returns the speed-up that a call at peak FLOP/s would have, or None."""
    peers = _PEERS.get(goal.measure, ())
    if not peers or cases.PEAK not in result.shares:
        return None
    return _speed_up(result, peers) / result.shares[cases.PEAK].median


def _over(result: Result, limit: str) -> float:
    return 1 / result.shares[limit].median


def _allocated(result: Result) -> float:
    memory = result.case.memory
    return memory.own_bytes / memory.avoided_bytes if memory else 0.0


# The programs that each speed-up is measured against. Of several, the fastest counts.
_PEERS = {
    "speed-up over the fastest peer": (cases.BEST, cases.ONEDNN),
    "speed-up over xla_best": (cases.BEST,),
    "speed-up over xla_naive": (cases.NAIVE,),
}
_MEASURES: dict[str, Callable[[Result], float]] = {
    **{name: functools.partial(_speed_up, peers=_PEERS[name]) for name in _PEERS},
    "time over the plain GEMM's": functools.partial(_over, limit=cases.PLAIN),
    "the same, launches apart": functools.partial(_over, limit=cases.PLAIN_APART),
    "time over that in one process": functools.partial(_over, limit=cases.IN_PROCESS),
    "allocated of what need not be": _allocated,
    "microseconds a call": lambda r: r.own.median,
}

GOALS = (
    Goal(("gemm",), "speed-up over the fastest peer", 0.95),
    Goal(_FORWARD, "speed-up over xla_best", 1.3, ("bfloat16",), _SEVERAL),
    Goal(_FORWARD, "speed-up over xla_naive", 2.3, ("bfloat16",), _SEVERAL),
    Goal(_FORWARD, "speed-up over xla_best", 1.1, ("float32",), _SEVERAL),
    Goal(_FORWARD, "speed-up over xla_best", 0.95, (), _SEVERAL, worst=True),
    Goal(_FORWARD, "time over the plain GEMM's", 1.15, (), (8,), at_most=True),
    Goal(_FORWARD, "the same, launches apart", 1.15, (), (8,), at_most=True),
    Goal(
        _FORWARD,
        "allocated of what need not be",
        0.01,
        (),
        _SEVERAL,
        worst=True,
        at_most=True,
    ),
    Goal(("linear_pair",), "speed-up over xla_best", 1.6, ("bfloat16",), _SEVERAL),
    Goal(("linear_pair",), "speed-up over xla_best", 1.1, ("float32",), _SEVERAL),
    Goal(
        ("dgrad_add", "wgrad_accumulate"),
        "time over the plain GEMM's",
        1.03,
        at_most=True,
    ),
    Goal(
        ("latency",),
        "microseconds a call",
        20,
        (),
        (2,),
        at_most=True,
        variants=("all_reduce",),
    ),
    Goal(
        ("all_gather_matmul", "matmul_reduce_scatter"),
        "speed-up over xla_best",
        1.5,
        processes=(2, 4),
    ),
    Goal(
        _FORWARD,
        "time over that in one process",
        1.1,
        at_most=True,
        processes=(2, 4),
    ),
    Goal(("barrier",), "microseconds a call", 10, at_most=True, processes=(2,)),
)


def judge(results: Sequence[Result]) -> list[Verdict]:
    """Compares the results of a benchmark run with all goals and returns the verdicts.

    Each goal yields a verdict for each op, variant, dtype, P and number of processes.
    """
    verdicts = []
    for goal in GOALS:
        concerned = [result for result in results if goal.concerns(result)]
        for key, group in _grouped(concerned).items():
            values = [_MEASURES[goal.measure](result) for result in group]
            limits = [_limit(result, goal) for result in group]
            verdicts.append(_verdict(goal, key, values, limits))
    return verdicts


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Returns the fields and the outcome of a verdict as JSON types."""
    found = dataclasses.asdict(verdict)
    return {**found, "reached": verdict.reached, "outcome": verdict.outcome}


def _grouped(results: Iterable[Result]):
    groups: dict[tuple[str, str, str, int, int], list[Result]] = {}
    for result in results:
        case = result.case
        key = (
            case.op,
            case.variant,
            case.dtype,
            case.num_ranks,
            case.num_processes,
        )
        groups.setdefault(key, []).append(result)
    return groups


def _verdict(goal, key, values, limits):
    worst = max if goal.at_most else min
    summarized = worst if goal.worst else geomean
    op, variant, dtype, num_ranks, num_processes = key
    return Verdict(
        op=op,
        variant=variant,
        dtype=dtype,
        num_ranks=num_ranks,
        measure=goal.measure,
        statistic="worst" if goal.worst else "geomean",
        value=summarized(values),
        bound=goal.bound,
        at_most=goal.at_most,
        num_shapes=len(values),
        num_processes=num_processes,
        limit=None if None in limits else summarized(limits),
    )
