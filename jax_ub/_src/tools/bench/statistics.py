"""Statistics of a series of times: median, spread, ratio and geometric mean."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, spread and best value of a series of times or ratios.

    `spread` is the interquartile range divided by the median, so a single outlier
    hardly changes it.
    """

    median: float
    spread: float
    best: float


def summarize(values: Sequence[float]) -> Summary:
    """Returns the median, spread and smallest value of a series of times."""
    if not values:
        raise ValueError("summarize: an empty series has no median. Run a round more.")
    middle = statistics.median(values)
    return Summary(middle, _interquartile_range(values) / middle, min(values))


def ratio(peer: Sequence[float], own: Sequence[float]) -> Summary:
    """Returns a summary of the speed-ups `peer / own`, one quotient for each round.

    Both series must come from the same rounds. A slow phase of the machine then affects
    both, and the median of the quotients is more stable than the quotient of the
    medians. `best` is the largest quotient.
    """
    if len(peer) != len(own):
        raise ValueError(
            f"ratio: {len(peer)} and {len(own)} rounds cannot be compared. Pass times "
            "of the same rounds."
        )
    quotients = [p / o for p, o in zip(peer, own, strict=True)]
    return dataclasses.replace(summarize(quotients), best=max(quotients))


def geomean(values: Iterable[float]) -> float:
    """Returns the geometric mean, where speed-ups of 2 and 1/2 average to 1."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("geomean: there are no values. Run at least one case.")
    return math.exp(sum(logs) / len(logs))


def _interquartile_range(values):
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
