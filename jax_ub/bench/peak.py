"""Peak FLOP/s of a machine: the rate of the engine's kernels without memory reads."""

import dataclasses

from jax_ub.bench import cases
from jax_ub.bench.devices import Ranks
from jax_ub.bench.timing import Candidate
from jax_ub.runtime import engine

_ENGINE_NAMES = {"float32": "f32", "bfloat16": "bf16"}
# 20 times the wake-up time of a thread, so all cores compute nearly all the time.
_DURATION_S = 0.005
# The best rate of this process so far in GFLOP/s, by the engine's dtype. A lower rate
# means that a process on the same core or a lower clock frequency has slowed the run.
_best: dict[str, float] = {}


@dataclasses.dataclass
class AtPeak(Candidate):
    """A limit: `flops` operations at the peak rate, which each call measures again.

    Attributes:
        flops: number of operations.
    """

    flops: int = 0

    def seconds(self) -> float:
        """Returns the time of `flops` operations at the rate that is measured now."""
        rate, dtype = self(), self.operands[0]
        _best[dtype] = max(rate, _best.get(dtype, rate))
        self.lost = 1 - rate / _best[dtype]
        return self.flops / rate / 1e9


def at_peak(ranks: Ranks, dtype: str, flops: int) -> list[Candidate]:
    """Returns the peak as a limit; nothing on GPUs or for a call without FLOPs."""
    if ranks.platform != "cpu" or not flops:
        return []
    operands = [_ENGINE_NAMES[dtype], _DURATION_S]
    measure = engine.load().peak_gflops
    return [AtPeak(cases.PEAK, measure, operands, flops=flops)]
