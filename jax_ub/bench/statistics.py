"""What is said about a series of times: median, spread, ratio, geometric mean."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """A series in three numbers.

    `spread` is the interquartile range over the median: half of all values lie within
    it, and a single interrupted round does not move it.
    """

    median: float
    spread: float
    best: float


def summarize(values: Sequence[float]) -> Summary:
    """Summarizes a series of times; the best is the smallest."""
    if not values:
        raise ValueError("summarize: an empty series has no median. Run a round more.")
    middle = statistics.median(values)
    return Summary(middle, _interquartile_range(values) / middle, min(values))


def ratio(peer: Sequence[float], own: Sequence[float]) -> Summary:
    """How many times as fast as `peer` `own` is, round by round.

    Both series come from the same rounds, so that what slows the machine down for a
    while slows both, and the median of the quotients is steadier than the quotient of
    the medians.
    """
    if len(peer) != len(own):
        raise ValueError(
            f"ratio: {len(peer)} and {len(own)} rounds cannot be compared. Pass times "
            "of the same rounds."
        )
    quotients = [p / o for p, o in zip(peer, own, strict=True)]
    return dataclasses.replace(summarize(quotients), best=max(quotients))


def geomean(values: Iterable[float]) -> float:
    """The geometric mean, which treats twice as fast and half as fast alike."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("geomean: there are no values. Run at least one case.")
    return math.exp(sum(logs) / len(logs))


def _interquartile_range(values):
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
