"""The peak of a machine: what the engine's kernels reach where no memory is read."""

import dataclasses

from jax_ub.bench import cases
from jax_ub.bench.devices import Ranks
from jax_ub.bench.timing import Candidate
from jax_ub.runtime import engine

_ENGINE_NAMES = {"float32": "f32", "bfloat16": "bf16"}
# Twenty times as long as a second thread may take to wake: the rest is on all cores.
_DURATION_S = 0.005
# The best rate of this process so far, in GF/s, by the engine's dtype. A machine that
# reaches less has lost the rest: to a neighbour on the same core, or to its clock.
_best: dict[str, float] = {}


@dataclasses.dataclass
class AtPeak(Candidate):
    """So many operations at the peak, which is measured anew by each call.

    Attributes:
        flops: how many.
    """

    flops: int = 0

    def seconds(self) -> float:
        """What the operations take, however long the measurement was."""
        rate, dtype = self(), self.operands[0]
        _best[dtype] = max(rate, _best.get(dtype, rate))
        self.lost = 1 - rate / _best[dtype]
        return self.flops / rate / 1e9


def at_peak(ranks: Ranks, dtype: str, flops: int) -> list[Candidate]:
    """The operations of a call as a limit; none on GPUs, or of a call without any."""
    if ranks.platform != "cpu" or not flops:
        return []
    operands = [_ENGINE_NAMES[dtype], _DURATION_S]
    measure = engine.load().peak_gflops
    return [AtPeak(cases.PEAK, measure, operands, flops=flops)]
