"""Measures a machine's peak FLOP/s: the GEMM kernels' rate without memory reads."""

import dataclasses

from jax_ub._src.dtypes import SHORT_NAMES
from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.timing import Candidate

# 20 times the wake-up time of a thread, so all cores compute nearly all the time.
_DURATION_S = 0.005
# The highest peak rate in GFLOP/s that this process has measured, by dtype name of the
# engine. A lower rate later means that another process on the same core or a lower
# clock frequency slowed the measurement.
_best: dict[str, float] = {}


@dataclasses.dataclass
class AtPeak(Candidate):
    """A limit to compare with: the seconds of `flops` operations at peak FLOP/s.

    Each timed call measures the peak rate again, on tiles that stay in the L1 cache.

    Attributes:
        flops: number of operations.
    """

    flops: int = 0

    def seconds(self) -> float:
        """Measures the peak rate and returns the seconds of `flops` operations.

        Also sets `lost`, the share by which the rate is below the best one so far.
        """
        rate, dtype = self(), self.operands[0]
        _best[dtype] = max(rate, _best.get(dtype, rate))
        self.lost = 1 - rate / _best[dtype]
        return self.flops / rate / 1e9


def at_peak(ranks: Ranks, dtype: str, flops: int) -> list[Candidate]:
    """Returns a candidate for the time of `flops` operations at peak FLOP/s.

    The list has one element. It is empty on GPUs and for a call without FLOPs.
    """
    if ranks.platform != "cpu" or not flops:
        return []
    operands = [SHORT_NAMES[dtype], _DURATION_S]
    measure = cpu_engine.load().peak_gflops
    return [AtPeak(cases.PEAK, measure, operands, flops=flops)]
