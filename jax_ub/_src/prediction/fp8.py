"""Predicts what FP8 saves in a linear layer: FP8 GEMMs, or FP8 on the wire only."""

import dataclasses

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.methods import Method
from jax_ub._src.prediction.cost import Workload, bounds
from jax_ub._src.prediction.estimate import estimate_workload
from jax_ub._src.prediction.hardware import Hardware

# The bytes per element of a cast with a scale per tensor or row: bf16 is read twice,
# for the largest value and for the cast, and e4m3 is written.
_CAST_BYTES = 2 + 2 + 1


@dataclasses.dataclass(frozen=True)
class Fp8Prediction:
    """The predicted seconds of a forward pass in bf16 and in FP8.

    `fp8_s` includes the cast of x, but not that of the kernel, which is cast once per
    step. `wire_s` is the time in bf16 with `wire_dtype="fp8"`.
    """

    bf16_s: float
    fp8_s: float
    wire_s: float

    @property
    def gain(self) -> float:
        return self.bf16_s / self.fp8_s

    @property
    def wire_pays(self) -> bool:
        return self.wire_s < self.bf16_s


def predict_fp8(work: Workload, machine: Hardware) -> Fp8Prediction:
    """Predicts a bf16 AG+GEMM or GEMM+RS in FP8, and with `wire_dtype="fp8"`."""
    if not machine.has_fp8:
        raise UnsupportedOverlapError(
            f"simulate: {machine.name} has no FP8 GEMM. Use another --hardware, such "
            "as h100."
        )
    part = machine.shared_by(work.num_ranks)

    def cast_s(num_elements):
        return _CAST_BYTES * num_elements / part.memory_bytes_per_s

    # A CPU multiplies FP8 as bf16.
    gemm_itemsize = 2 if machine.is_host else 1
    x_size = work.M * work.K // work.num_ranks
    sent = dataclasses.replace(work, itemsize=1) if work.gathers else work
    fp8 = dataclasses.replace(sent, gemm_itemsize=gemm_itemsize)
    bf16_s = estimate_workload(work, Method.AUTO, machine).seconds
    fp8_s = estimate_workload(fp8, Method.AUTO, machine).seconds + cast_s(x_size)
    return Fp8Prediction(bf16_s, fp8_s, _wire_seconds(work, machine, cast_s))


def _wire_seconds(work, machine, cast_s):
    """Returns the seconds of a pass with `wire_dtype="fp8"`.

    Only the CPU engine overlaps it, and only an all-gather. Otherwise the GEMM and the
    collective run one after the other.
    """
    rows = dataclasses.replace(work, itemsize=1, partial_itemsize=1, gemm_itemsize=2)
    if work.num_ranks == 1:
        return estimate_workload(work, Method.AUTO, machine).seconds
    if work.gathers:
        plan = Method.AUTO if machine.is_host else Method.XLA
        seconds = estimate_workload(rows, plan, machine).seconds
        widened = 0 if machine.is_host else work.M * work.K
        return seconds + cast_s(work.M * work.K // work.num_ranks) + cast_s(widened) / 2
    # All partial sums are cast, and the received ones are summed.
    return bounds(rows, machine).serial_s + 2 * cast_s(work.M * work.N)
