"""Performance goals of the project: `python -m tests.bench.goals found.json`.

They compare the figures that `python -m jax_ub bench --json found.json` writes, on a
machine with AVX512-BF16, with the bounds in `GOALS`.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ub._src.tables import format_table

_FORWARD = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_SEVERAL = (2, 4, 8)
# A benchmark result, as in the JSON.
Result = dict[str, Any]
_KEY = ("op", "variant", "dtype", "num_ranks", "num_processes")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound for a figure, separately for each op, variant, dtype, P and processes.

    Empty `dtypes`, `ranks` and `variants` mean all. With `worst`, every shape must
    reach the bound, not only the geometric mean over the shapes.
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

    def applies_to(self, result: Result) -> bool:
        return (
            result["op"] in self.ops
            and result["num_processes"] in self.processes
            and (not self.dtypes or result["dtype"] in self.dtypes)
            and (not self.ranks or result["num_ranks"] in self.ranks)
            and (not self.variants or result["variant"] in self.variants)
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The value that a benchmark run reached for one goal.

    For a speed-up, `limit` is the value it would have if every call ran at the
    machine's peak FLOP/s.
    """

    goal: Goal
    key: dict[str, Any]
    value: float
    limit: float | None = None

    @property
    def outcome(self) -> str:
        bound = self.goal.bound
        if self.value <= bound if self.goal.at_most else self.value >= bound:
            return "reached"
        is_beyond = self.limit is not None and self.limit < bound
        return "beyond this machine" if is_beyond else "NOT reached"


# The programs that each speed-up is measured against. Of several, the fastest counts.
_PEERS = {
    "speed-up over the fastest peer": ("xla_best", "onednn"),
    "speed-up over xla_best": ("xla_best",),
    "speed-up over xla_naive": ("xla_naive",),
}


def _speed_up(result: Result, measure: str) -> float:
    found = result["speedups"]
    return min(found[peer]["median"] for peer in _PEERS[measure] if peer in found)


def _over(limit: str) -> Callable[[Result], float]:
    return lambda result: 1 / result["shares"][limit]["median"]


def _allocated(result: Result) -> float:
    memory = result["memory"]
    return memory["own_bytes"] / memory["avoided_bytes"] if memory else 0.0


_MEASURES: dict[str, Callable[[Result], float]] = {
    "time over the plain GEMM's": _over("plain_gemm"),
    "time over one process's": _over("in_process"),
    "allocated share": _allocated,
    "microseconds per call": lambda r: r["times_us"]["jax_ub"]["median"],
}
_BF16, _F32 = ("bfloat16",), ("float32",)
_PAIR, _ADD = ("linear_pair",), ("dgrad_add", "wgrad_accumulate")
_GATHER_SCATTER = ("all_gather_matmul", "matmul_reduce_scatter")
_BEST, _NAIVE = "speed-up over xla_best", "speed-up over xla_naive"
_PLAIN, _CALL = "time over the plain GEMM's", "microseconds per call"
_LIMITED: dict[str, Any] = {"at_most": True}

GOALS = (
    Goal(("gemm",), "speed-up over the fastest peer", 0.95),
    Goal(_FORWARD, _BEST, 1.3, _BF16, _SEVERAL),
    Goal(_FORWARD, _NAIVE, 2.3, _BF16, _SEVERAL),
    Goal(_FORWARD, _BEST, 1.1, _F32, _SEVERAL),
    Goal(_FORWARD, _BEST, 0.95, (), _SEVERAL, worst=True),
    Goal(_FORWARD, _PLAIN, 1.15, (), (8,), **_LIMITED),
    Goal(_FORWARD, "allocated share", 0.01, (), _SEVERAL, worst=True, **_LIMITED),
    Goal(_PAIR, _BEST, 1.6, _BF16, _SEVERAL),
    Goal(_PAIR, _BEST, 1.1, _F32, _SEVERAL),
    Goal(_ADD, _PLAIN, 1.03, **_LIMITED),
    Goal(("latency",), _CALL, 20, (), (2,), variants=("all_reduce",), **_LIMITED),
    Goal(_GATHER_SCATTER, _BEST, 1.5, processes=(2, 4)),
    Goal(_FORWARD, "time over one process's", 1.1, processes=(2, 4), **_LIMITED),
    Goal(("barrier",), _CALL, 10, processes=(2,), **_LIMITED),
)


def judge(results: Sequence[Result]) -> Iterator[Verdict]:
    """Compares the results of a benchmark run with all goals."""
    for goal in GOALS:
        groups: dict[tuple[Any, ...], list[Result]] = {}
        for result in filter(goal.applies_to, results):
            groups.setdefault(tuple(result[k] for k in _KEY), []).append(result)
        worst = max if goal.at_most else min
        average = worst if goal.worst else statistics.geometric_mean
        for key, group in groups.items():
            named, limit = dict(zip(_KEY, key, strict=True)), None
            if goal.measure in _PEERS:
                values = [_speed_up(result, goal.measure) for result in group]
                peaks = [r["shares"].get("peak", {}).get("median") for r in group]
                if None not in peaks:
                    limit = average(list(map(float.__truediv__, values, peaks)))
            else:
                values = list(map(_MEASURES[goal.measure], group))
            # The geometric mean of zeros is undefined.
            value = average(values) if all(values) else math.prod(values)
            yield Verdict(goal, named, value, limit)


def table(verdicts: Sequence[Verdict]) -> list[str]:
    head = (*_KEY, "figure", "over shapes", "value", "limit", "goal", "")
    rows = [
        (
            *v.key.values(),
            v.goal.measure,
            "worst" if v.goal.worst else "mean",
            f"{v.value:.3g}",
            "" if v.limit is None else f"{v.limit:.3g}",
            f"{'<=' if v.goal.at_most else '>='} {v.goal.bound:g}",
            v.outcome,
        )
        for v in verdicts
    ]
    return format_table(head, rows, is_markdown=True)


if __name__ == "__main__":
    found = json.loads(pathlib.Path(sys.argv[1]).read_text())
    sys.stdout.write("\n".join(table(list(judge(found["results"])))) + "\n")
