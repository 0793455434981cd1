"""What the cost model knows of a machine: rates and latencies, none of them hidden.

Measured are, on one H200: 788 TFLOP/s for a dense bf16 GEMM of 8192^3 on random data
(power-limited), and 4.3 TB/s read and written together by a copy. Other GPUs take the
same shares of their datasheet's peaks. Efficiencies of wires and collectives, and the
latencies, are assumptions; `jax_ub simulate` prints them with every table.
"""

import dataclasses
from collections.abc import Mapping

from jax_ub.errors import UnknownNameError, nearest, shown

# H200: 788 of 989.4 TFLOP/s, 4.3 of 4.8 TB/s.
_GEMM_SHARE = 788 / 989.4
_MEMORY_SHARE = 4.3 / 4.8
# Dense rates over that of bf16: f32 runs as TF32.
_RATE_OF_ITEMSIZE = {1: 2.0, 2: 1.0, 4: 0.5}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One machine; all rates are of one rank's GPU, or of a host that all ranks share.

    Attributes:
        name: as on the command line.
        flops_per_s: of a large dense bf16 GEMM.
        wire_bytes_per_s: to the peers, one direction.
        memory_bytes_per_s: read and written together.
        processors: multiprocessors that run one tile each; 0 for a host whose ranks
            share its cores, and where a rank does one thing at a time.
        wire_share: part of the wire that a copy engine reaches.
        collective_share: part of the wire that the vendor's collectives reach.
        handshake_s: one signal across the wire.
        launch_s: begin of a kernel.
        collective_s: begin of a collective of the vendor's library.
        reserved_processors: kept free of GEMM tiles while something is communicated.
        flops_f32_per_s: of an f32 GEMM, where that is known apart.
    """

    name: str
    flops_per_s: float
    wire_bytes_per_s: float
    memory_bytes_per_s: float
    processors: int
    wire_share: float = 0.8
    collective_share: float = 0.8
    handshake_s: float = 6e-6
    launch_s: float = 3e-6
    collective_s: float = 15e-6
    reserved_processors: int = 2
    flops_f32_per_s: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether the ranks share the cores of one host."""
        return self.processors == 0

    @property
    def copy_bytes_per_s(self) -> float:
        """What one rank's puts reach."""
        return self.wire_bytes_per_s * self.wire_share

    def flops_of(self, itemsize: int) -> float:
        """GEMM rate of one rank for operands of that size."""
        if itemsize == 4 and self.flops_f32_per_s is not None:
            return self.flops_f32_per_s
        return self.flops_per_s * _RATE_OF_ITEMSIZE[itemsize]

    def shared_by(self, num_ranks: int) -> "Hardware":
        """What one of the ranks has: a GPU of its own, or its part of the host."""
        if not self.is_host:
            return self
        f32 = self.flops_f32_per_s
        return dataclasses.replace(
            self,
            flops_per_s=self.flops_per_s / num_ranks,
            flops_f32_per_s=None if f32 is None else f32 / num_ranks,
            wire_bytes_per_s=self.wire_bytes_per_s / num_ranks,
            memory_bytes_per_s=self.memory_bytes_per_s / num_ranks,
        )


def _gpu(name, peak_flops, wire, peak_memory, processors):
    return Hardware(
        name,
        peak_flops * _GEMM_SHARE,
        wire,
        peak_memory * _MEMORY_SHARE,
        processors,
    )


def host(
    flops_per_s: float,
    copy_bytes_per_s: float,
    flops_f32_per_s: float | None = None,
    name: str = "cpu",
) -> Hardware:
    """A host whose ranks share its cores, with figures that were measured on it.

    Args:
        flops_per_s: of all cores together, in a bf16 GEMM.
        copy_bytes_per_s: bytes read and written together, all cores.
        flops_f32_per_s: the same as `flops_per_s` for f32.
        name: how it is called in tables.
    """
    return Hardware(
        name,
        flops_per_s,
        # A put reads and writes memory.
        wire_bytes_per_s=copy_bytes_per_s / 2,
        memory_bytes_per_s=copy_bytes_per_s,
        processors=0,
        wire_share=1.0,
        handshake_s=2e-6,
        launch_s=1e-6,
        collective_s=20e-6,
        reserved_processors=0,
        flops_f32_per_s=flops_f32_per_s,
    )


HARDWARE: Mapping[str, Hardware] = {
    machine.name: machine
    for machine in (
        _gpu("a100", 312e12, 300e9, 2.039e12, 108),
        _gpu("h100", 989.4e12, 450e9, 3.35e12, 132),
        _gpu("h200", 989.4e12, 450e9, 4.8e12, 132),
        _gpu("b200", 2250e12, 900e9, 8.0e12, 148),
        # Two cores with AVX2, as docs/bench measured them; give your own with --gflops.
        host(170e9, 20e9, 172e9),
    )
}


def find(name: "str | Hardware") -> Hardware:
    """Finds a machine by its name.

    Raises:
        UnknownNameError: if there is none of that name; names the nearest.
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str) or name not in HARDWARE:
        raise UnknownNameError(
            f"hardware {shown(name)} is not known. {nearest(name, HARDWARE)}"
        )
    return HARDWARE[name]
