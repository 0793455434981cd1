"""Options of how the engine runs a call: schedule variant and GPU kernel launches."""

import dataclasses

from jax_ub._src.config.config import OverlapConfig
from jax_ub._src.methods import Variant

# Multiprocessors that GEMMs leave free when copy engines send the data. The kernels
# that wait, signal and sum still need some; if a GEMM occupied all multiprocessors,
# they would start only after it.
_MARGIN_BESIDE_COPY_ENGINES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """How the engine runs a method: the schedule's variant and GPU launch options.

    Results do not depend on them, with one exception: `sm_margin` and `gemm_algorithm`
    may change the order in which a GEMM sums.

    Attributes:
        use_ce: whether copy engines send the data. Otherwise kernels do.
        num_sm: number of thread blocks of the kernels that send; 0 lets the engine
            choose.
        cga_size: cluster size of the kernels that send; 0 means no clusters.
        sm_margin: number of multiprocessors that GEMMs leave free.
        num_lanes: number of streams for GEMMs, used round-robin.
        gemm_algorithm: index of the algorithm among those that cuBLASLt proposes for a
            GEMM, 0 (its first choice) to 7. The last one is used if there are fewer.
        comm_priority: CUDA priority of the communication stream; 0 means the most
            urgent priority of the device.
        gemm_priority: CUDA priority of the GEMM streams; 0 is the least urgent.
        variant: variant of the schedule, for calls that have it. It is the only option
            that takes effect on CPUs.
    """

    use_ce: bool = True
    num_sm: int = 0
    cga_size: int = 0
    sm_margin: int = 0
    num_lanes: int = 2
    gemm_algorithm: int = 0
    comm_priority: int = 0
    gemm_priority: int = 0
    variant: Variant = Variant.PLAIN

    def attributes(self) -> dict[str, int]:
        """Returns the GPU launch options as FFI attributes, which csrc/ffi decodes."""
        fields = dataclasses.asdict(self)
        del fields["variant"]
        return {name: int(value) for name, value in fields.items()}

    def differences(self) -> dict[str, bool | int | str]:
        """Returns the options that are not at their defaults, for files and tables."""
        return {
            field.name: value.value if isinstance(value, Variant) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def kernel_options_of(config: OverlapConfig) -> KernelOptions:
    """Converts the settings of a named overlap to options for its GPU kernels.

    `num_sm` and `cga_size` describe the kernels that send, so they have no effect with
    copy engines. `set_sm_margin` then only leaves room for the small kernels that wait,
    signal and sum.
    """
    margin = _MARGIN_BESIDE_COPY_ENGINES if config.use_ce else config.num_sm
    return KernelOptions(
        use_ce=config.use_ce,
        num_sm=config.num_sm,
        cga_size=config.cga_size,
        sm_margin=margin if config.set_sm_margin else 0,
        comm_priority=config.comm_priority,
        gemm_priority=config.gemm_priority,
        variant=_variant_of(config),
    )


def _variant_of(config):
    if config.aggregate:
        return Variant.AGGREGATE
    if config.pipeline_rs_overlap_first_gemm:
        return Variant.OVERLAP_FIRST_GEMM
    return Variant.PLAIN
