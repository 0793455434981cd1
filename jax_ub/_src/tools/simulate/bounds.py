"""Lower bounds of a call's time, and the time of the same call without overlap.

M tokens, K contracting, N output, P ranks; F FLOP/s and B bytes/s per wire direction,
for bf16:

    gemm    2 M N K / P / F
    wire    (P - 1) / P M K 2 / B for a gather, with N for K for a scatter; twice that
            for an all-reduce
    ideal   max(gemm, wire)
    serial  the library's GEMM, then the vendor's collective
"""

import dataclasses

from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.tiles import library_seconds
from jax_ub._src.tools.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Times in seconds of the GEMM and of the communication of one call.

    `gemm_s` and `wire_s` assume the machine's full rate and bandwidth. `library_gemm_s`
    is the time of a vendor library's GEMM and `collective_s` the time of its
    collective.
    """

    gemm_s: float
    wire_s: float
    library_gemm_s: float
    collective_s: float

    @property
    def ideal_s(self) -> float:
        """Returns a lower bound of the call's time, if GEMM and transfers overlap."""
        return max(self.gemm_s, self.wire_s)

    @property
    def serial_s(self) -> float:
        """Returns the time without overlap: the library's GEMM, then the collective."""
        return self.library_gemm_s + self.collective_s


def bounds(workload: Workload, hardware: Hardware) -> Bounds:
    """Computes the bounds of a call's time; all ranks run the same workload."""
    part = hardware.shared_by(workload.num_ranks)
    wire = workload.moved_bytes / part.wire_bytes_per_s
    product = workload.has_product
    flops = workload.gemm.flops if product else 0.0
    library = (
        library_seconds(part, workload.gemm, workload.itemsize) if product else 0.0
    )
    collective = 0.0
    if workload.num_ranks > 1:
        collective = wire / part.collective_share + part.collective_s
    return Bounds(flops / part.flops_of(workload.itemsize), wire, library, collective)
