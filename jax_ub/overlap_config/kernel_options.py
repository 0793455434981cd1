"""What of a configuration acts on how a call runs, apart from method and splits."""

import dataclasses

from jax_ub.methods import Variant
from jax_ub.overlap_config.config import OverlapConfig

# Copy engines need no multiprocessors, but the kernels that wait, signal and sum do:
# products that take all of them would let those in only when they end.
_MARGIN_BESIDE_COPY_ENGINES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The variant of the schedule, and what is not the same on every GPU.

    Results do not depend on it, but for the order in which a product is summed, which
    may be another with `sm_margin` and `gemm_algorithm`.

    Attributes:
        use_ce: whether copy engines move what is sent; else kernels do.
        num_sm: thread blocks of those kernels; 0 is the engine's choice.
        cga_size: their cluster size; 0 is none.
        sm_margin: multiprocessors that products leave free.
        num_lanes: streams for products, used in turn.
        gemm_algorithm: which of the algorithms that cuBLASLt proposes for a product, 0
            (its best) to 7; its last where it proposes fewer.
        comm_priority: of the communication's stream, in CUDA's numbers; 0 is the most
            urgent there is.
        gemm_priority: of the products' streams; 0 is the least urgent.
        variant: of the schedule, for calls that have it; on a CPU too.
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
        """What a device that has streams is told, as csrc/ffi reads it."""
        fields = dataclasses.asdict(self)
        del fields["variant"]
        return {name: int(value) for name, value in fields.items()}

    def differences(self) -> dict[str, bool | int | str]:
        """What is not as it is by default, by name, as files and tables have it."""
        return {
            field.name: value.value if isinstance(value, Variant) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def kernel_options_of(config: OverlapConfig) -> KernelOptions:
    """Reads what acts on a GPU from the configuration of a named overlap.

    `num_sm` and `cga_size` are those of the kernels that send, so they say nothing
    beside copy engines; there `set_sm_margin` leaves room for the small kernels only.
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
