"""A case after it was timed: what is printed, drawn, judged and written as JSON."""

import dataclasses
from typing import Any

from jax_ub.bench import cases
from jax_ub.bench.cases import Case
from jax_ub.bench.statistics import Summary, ratio, summarize
from jax_ub.bench.timing import Rounds
from jax_ub.bench.workloads import Shape


@dataclasses.dataclass(frozen=True)
class Result:
    """One case's figures.

    Attributes:
        case: what was compared.
        times_us: each candidate's time.
        speedups: how many times as fast as each peer jax_ub is.
        shares: each limit's time over jax_ub's: 1 is as fast as the limit; the plain
            GEMM's also without what launching takes, where that was timed.
        elsewhere: the part of the machine that others had, in the worst round.
        threads: how many threads the engine computed with, where several counts are
            compared.
        over_first: jax_ub's time over its time with the first of these counts.
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
        """jax_ub's time in microseconds."""
        return self.times_us[cases.OWN]

    @property
    def gflops(self) -> float:
        """Billion operations a second of jax_ub, 0 where none are counted."""
        return self.case.flops / self.own.median / 1e3

    def as_json(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
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
        """What another process wrote, without the programs."""
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
    """Draws a case's figures from the seconds of its rounds."""
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
    """The seconds of one call, also where programs chain several."""
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
        # One device is launched sooner than several.
        plain = _beyond(each[cases.PLAIN], each[cases.LAUNCH_ONE])
        shares[cases.PLAIN_APART] = ratio(plain, _beyond(own, each[cases.LAUNCH]))
    return shares


def _beyond(seconds, base):
    # A round in which the longer program was not slower was disturbed; the smallest
    # positive time keeps the quotients defined.
    return [max(more - less, 1e-9) for more, less in zip(seconds, base, strict=True)]


def _as_json(summaries):
    return {name: dataclasses.asdict(summary) for name, summary in summaries.items()}
