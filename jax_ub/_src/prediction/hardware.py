"""Defines the machines of the simulator: their rates, bandwidths and latencies.

The efficiencies of wires and collectives, and all latencies but those of launches, are
assumptions. `python -m jax_ub simulate` prints all parameters with every table.
"""

import dataclasses
import re
from collections.abc import Mapping

from jax_ub._src.methods import KernelOptions

# Shares of the datasheet's peak rates that were measured on one H200. The model assumes
# them for all GPUs.
_GEMM_SHARE = 788 / 989.4  # TFLOP/s of a bf16 GEMM of 8192^3, at the power limit
_MEMORY_SHARE = 4.3 / 4.8  # TB/s of a copy, counting reads and writes
# The rates of dense GEMMs relative to bf16, keyed by bytes per element: FP8, bf16 or
# f16, and f32, which runs as TF32. The model has no rates for other sizes.
RATE_OF_ITEMSIZE = {1: 2.0, 2: 1.0, 4: 0.5}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates and latencies of a kind of GPU or a CPU host, for the simulator.

    Rates are for each GPU, or for a host's CPU cores that all ranks share.

    Attributes:
        flops_per_s: rate of a large dense bf16 GEMM.
        wire_bytes_per_s: bandwidth to the peers in one direction.
        memory_bytes_per_s: memory bandwidth, counting reads and writes.
        processors: number of multiprocessors, each of which runs one tile at a time. 0
            for a host, whose ranks share its cores and run one step at a time.
        wire_share: share of the wire's bandwidth that a copy engine reaches.
        collective_share: share that the vendor's collectives reach.
        handshake_s, launch_s, collective_s: latency of a signal and the wait for it, of
            a launch, and of a collective.
        reserved_processors: number without GEMM tiles during communication.
        flops_f32_per_s: rate of an f32 GEMM; None derives it from `flops_per_s`.
    """

    name: str
    flops_per_s: float
    wire_bytes_per_s: float
    memory_bytes_per_s: float
    processors: int
    wire_share: float = 0.8
    collective_share: float = 0.8
    handshake_s: float = 6e-6
    launch_s: float = 1.3e-6  # in replayed calls on one H100 (docs/gpu/2026-11-27)
    collective_s: float = 15e-6
    reserved_processors: int = KernelOptions.sm_margin
    flops_f32_per_s: float | None = None

    @property
    def has_fp8(self) -> bool:
        return self.name != "a100"

    @property
    def is_host(self) -> bool:
        return self.processors == 0

    def vendor_collective_s(self, num_bytes: float) -> float:
        """Returns the seconds in which the vendor's library sends a rank's bytes."""
        if num_bytes == 0:
            return 0.0
        wire_s = num_bytes / self.wire_bytes_per_s
        return wire_s / self.collective_share + self.collective_s

    def flops_of(self, itemsize: int) -> float:
        """Returns one rank's GEMM rate in FLOP/s for elements of `itemsize` bytes."""
        if itemsize == 1 and (self.is_host or not self.has_fp8):
            itemsize = 2  # FP8 is converted to bf16
        if itemsize == 4 and self.flops_f32_per_s is not None:
            return self.flops_f32_per_s
        return self.flops_per_s * RATE_OF_ITEMSIZE[itemsize]

    def shared_by(self, num_ranks: int) -> "Hardware":
        """Returns the machine with one rank's rates: ranks share those of a host."""
        if not self.is_host:
            return self
        rates = {name: rate for name, rate in vars(self).items() if "_per_s" in name}
        shared = {name: rate / num_ranks for name, rate in rates.items() if rate}
        return dataclasses.replace(self, **shared)


def _gpu(name, peak_flops, wire, peak_memory, processors):
    flops, memory = peak_flops * _GEMM_SHARE, peak_memory * _MEMORY_SHARE
    return Hardware(name, flops, wire, memory, processors)


def host(
    flops_per_s: float, copy_bytes_per_s: float, flops_f32_per_s: float | None = None
) -> Hardware:
    """Returns a machine whose ranks share the CPU cores of one host.

    `flops_per_s` is the bf16 GEMM rate and `copy_bytes_per_s` the copy bandwidth of all
    cores, counting reads and writes.
    """
    return Hardware(
        "cpu",
        flops_per_s,
        # On a host, a rank sends data by copying it, which both reads and writes
        # memory. So the wire has half the copy bandwidth.
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
        # "cpu" describes two cores with AVX2. The options --gflops and --copy-gbs of
        # `python -m jax_ub simulate` replace its first two rates.
        host(170e9, 20e9, 172e9),
    )
}


def name_of_kind(device_kind: str) -> str | None:
    """Returns the `HARDWARE` key of a JAX device kind, as "h100"; None if unknown."""
    kind = device_kind.lower()  # such as "nvidia a100-sxm4-80gb", not "rtx a1000"
    return next((name for name in HARDWARE if re.search(rf"{name}(?!\d)", kind)), None)
