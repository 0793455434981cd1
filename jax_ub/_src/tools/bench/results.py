"""Figures of a timed case: times, speed-ups over the peers and shares of the limits."""

import dataclasses
from typing import Any

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.bench.statistics import Summary, ratio, summarize
from jax_ub._src.tools.bench.timing import Rounds
from jax_ub._src.tools.bench.workloads import Shape


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of one benchmark case, each summarized over the timed rounds.

    Attributes:
        case: the benchmark case.
        times_us: time of each candidate.
        speedups: each peer's time divided by jax_ub's.
        shares: each limit's time divided by jax_ub's; 1 is as fast as the limit. The
            plain GEMM also has a share after subtracting launch times, if measured.
        elsewhere: CPU share of other processes in the worst of the kept rounds.
        threads: number of the engine's threads, if several numbers are compared.
        over_first: jax_ub's time divided by its time with the first of these numbers.
    """

    case: Case
    times_us: dict[str, Summary]
    speedups: dict[str, Summary]
    shares: dict[str, Summary]
    elsewhere: float
    threads: int | None = None
    over_first: Summary | None = None

    @property
    def own(self) -> Summary:
        """Returns jax_ub's time in microseconds: median, spread and best value."""
        return self.times_us[cases.OWN]

    @property
    def gflops(self) -> float:
        """Returns jax_ub's rate in GFLOP/s, or 0 if the case counts no FLOPs."""
        return self.case.flops / self.own.median / 1e3

    def as_json(self) -> dict[str, Any]:
        """Returns the case and all of its figures as JSON types."""
        case = self.case
        return {
            "op": case.op,
            "variant": case.variant,
            "dtype": case.dtype,
            "num_ranks": case.num_ranks,
            "num_processes": case.num_processes,
            "shape": dataclasses.asdict(case.shape),
            "gflops": self.gflops,
            "times_us": _as_json(self.times_us),
            "speedups": _as_json(self.speedups),
            "shares": _as_json(self.shares),
            "written": {c.name: c.way for c in case.candidates if c.way},
            "memory": case.memory and dataclasses.asdict(case.memory),
            "notes": case.notes,
            "elsewhere": self.elsewhere,
            "threads": self.threads,
            "over_first": self.over_first and dataclasses.asdict(self.over_first),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Result":
        """Restores a result from the output of `as_json`, without its programs."""
        case = Case(
            op=found["op"],
            variant=found["variant"],
            dtype=found["dtype"],
            num_ranks=found["num_ranks"],
            shape=Shape(**found["shape"]),
            flops=round(found["gflops"] * found["times_us"][cases.OWN]["median"] * 1e3),
            candidates=[],
            notes=found["notes"],
            num_processes=found["num_processes"],
        )
        times, speedups, shares = (
            {name: Summary(**summary) for name, summary in found[key].items()}
            for key in ("times_us", "speedups", "shares")
        )
        return cls(case, times, speedups, shares, found["elsewhere"])


def evaluate(case: Case, rounds: Rounds) -> Result:
    """Returns the figures of a case, computed from each candidate's times.

    `rounds` has the seconds of every candidate in each round.
    """
    each = each_call(case, rounds.seconds)
    own = each[cases.OWN]
    return Result(
        case=case,
        times_us={
            name: summarize([1e6 * value for value in values])
            for name, values in each.items()
        },
        speedups={name: ratio(each[name], own) for name in cases.PEERS if name in each},
        shares=_shares(each),
        elsewhere=rounds.elsewhere,
    )


def each_call(case: Case, times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Returns each program's seconds per call, in every round.

    For a case of chained calls, it subtracts the time of a single call from the time of
    the chain and divides by the number of further calls.
    """
    if case.calls == 1:
        return times
    each = dict(times)
    for name in (cases.OWN, cases.BEST):
        more = _beyond(times[name], times[f"{name}_once"])
        each[name] = [seconds / case.calls for seconds in more]
    return each


def _shares(each):
    own = each[cases.OWN]
    shares = {name: ratio(each[name], own) for name in cases.LIMITS if name in each}
    if cases.LAUNCH in each:
        # The plain GEMM runs on one device, where a launch takes less time than on all
        # devices. Each program's time is therefore reduced by its own launch time.
        plain = _beyond(each[cases.PLAIN], each[cases.LAUNCH_ONE])
        shares[cases.PLAIN_APART] = ratio(plain, _beyond(own, each[cases.LAUNCH]))
    return shares


def _beyond(seconds, base):
    # If noise makes the longer program the faster one in a round, the difference would
    # not be positive. A tiny positive time keeps the quotients defined.
    return [max(more - less, 1e-9) for more, less in zip(seconds, base, strict=True)]


def _as_json(summaries):
    return {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
