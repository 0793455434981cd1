"""`OverlapConfig`: the settings of one named overlap, and their valid values."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping

import numpy as np

from jax_ub._src.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.methods import KernelOptions, Method, Variant
from jax_ub._src.parallel import DGRAD, FPROP, PASSES, CommOverlapType
from jax_ub._src.scalars import is_integer

# The largest valid `num_sm`, the number of thread blocks that send. Transformer Engine
# has the same limit, because its collectives have flags for 32 thread blocks.
_MOST_SM = 32
# Valid values of `cga_size`, the number of thread blocks in a cluster. GPUs support
# clusters of up to 8 blocks since Hopper.
_CGA_SIZES = (1, 2, 4, 8)
# CUDA stream priorities. Smaller numbers are more urgent.
HIGHEST_PRIORITY, LOWEST_PRIORITY = -5, 0
# The largest valid `num_splits`, the number of parts into which a rank's chunk is
# split. With more splits, 16 ranks would need more slots (receive buffers) than a
# communicator has.
_MOST_SPLITS = 128


class UserBufferQuantizationMode(enum.Enum):
    """Whether the operands of overlapped calls are communicated in FP8.

    `NONE` means unquantized operands in their dtype; `FP8` means quantized operands of
    one byte per element.

    Transformer Engine: `UserBufferQuantizationMode`.
    """

    NONE = "none"
    FP8 = "fp8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapConfig(Mapping):
    """The settings by which one pass of a layer, such as "qkv_fprop", communicates.

    `method`, `num_splits`, `aggregate`, `pipeline_rs_overlap_first_gemm`, `fp8_buf` and
    `wire_dtype` take effect on all devices. The other keys set launch parameters of GPU
    kernels and streams; on CPUs they are checked and stored, but have no effect.
    docs/initialize_ub.md describes each key.

    Transformer Engine: the dictionaries in `ub_cfgs`.
    """

    method: str
    comm_type: CommOverlapType
    num_splits: int
    aggregate: bool
    num_sm: int
    cga_size: int
    set_sm_margin: bool
    use_ce: bool
    fp8_buf: bool
    wire_dtype: str | None
    comm_priority: int
    gemm_priority: int
    pipeline_rs_overlap_first_gemm: bool

    @property
    def is_reduce_scatter(self) -> bool:
        """Returns whether the collective is a reduce-scatter, not an all-gather."""
        return self.comm_type is CommOverlapType.RS

    @property
    def atomic_gemm(self) -> bool:
        """Returns False: Transformer Engine's atomic GEMM is not implemented."""
        return False

    @property
    def kernel_options(self) -> KernelOptions:
        """Returns the settings that the schedule and the GPU kernels use.

        `num_sm` and `cga_size` describe the kernels that send, so they have no effect
        with copy engines. GEMMs then leave the default number of multiprocessors free,
        for the small kernels that wait, signal and sum.
        """
        margin = KernelOptions.sm_margin
        if self.set_sm_margin and not self.use_ce:
            margin = self.num_sm
        variant = Variant.PLAIN
        if self.aggregate:
            variant = Variant.AGGREGATE
        elif self.pipeline_rs_overlap_first_gemm:
            variant = Variant.OVERLAP_FIRST_GEMM
        return KernelOptions(
            use_ce=self.use_ce,
            num_sm=self.num_sm,
            cga_size=self.cga_size,
            sm_margin=margin,
            comm_priority=self.comm_priority,
            gemm_priority=self.gemm_priority,
            variant=variant,
        )

    def __getitem__(self, key: str):
        """Returns the setting of a Transformer Engine key, such as "num_splits"."""
        if key not in KEYS:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)


def _flag(value):
    # Megatron's configuration files contain 0 and 1 instead of false and true.
    is_number = is_integer(value) and value in (0, 1)
    if not is_number and not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _integer_in(values):
    def read(value):
        if not is_integer(value):
            raise TypeError
        if int(value) not in values:
            raise ValueError
        return int(value)

    return read


def _member(kind, value):
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError
    return kind(str(value))


def _method(value):
    return _member(Method, Method.AUTO if value is None else value).value


def _comm_type(value):
    return _member(CommOverlapType, value.upper() if isinstance(value, str) else value)


def _wire_dtype(value):
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError
    if value != "fp8":
        raise ValueError
    return str(value)


_METHODS = ", ".join(f'"{method.value}"' for method in Method)
_FLAG = (_flag, "True or False (or 1 or 0)")
_PRIORITY = (
    _integer_in(range(HIGHEST_PRIORITY, LOWEST_PRIORITY + 1)),
    f"a stream priority, {HIGHEST_PRIORITY} (first) to {LOWEST_PRIORITY}",
)


def _up_to(most):
    return _integer_in(range(1, most + 1)), f"an integer, 1 to {most}"


# For each setting, a function that checks and converts its value, and a text that lists
# the valid values.
KEYS = {
    "method": (_method, f"one of {_METHODS}; None is auto"),
    "comm_type": (_comm_type, '"AG" or "RS"'),
    "is_reduce_scatter": _FLAG,
    "num_splits": _up_to(_MOST_SPLITS),
    "aggregate": _FLAG,
    "num_sm": _up_to(_MOST_SM),
    "cga_size": (_integer_in(_CGA_SIZES), "1, 2, 4 or 8"),
    "set_sm_margin": _FLAG,
    "use_ce": _FLAG,
    "fp8_buf": _FLAG,
    "wire_dtype": (_wire_dtype, '"fp8" or None'),
    "comm_priority": _PRIORITY,
    "gemm_priority": _PRIORITY,
    "pipeline_rs_overlap_first_gemm": _FLAG,
    "atomic_gemm": _FLAG,
}


def read_entry(name: str, entry: object) -> dict[str, object]:
    """Checks and converts the user's settings for one name, such as "qkv_fprop".

    Returns:
        The entry with values of `OverlapConfig`'s types. `is_reduce_scatter` is
        replaced by `comm_type`, and `atomic_gemm` is removed.
    """
    if not isinstance(entry, Mapping):
        raise ConfigurationTypeError(
            f"ub_cfgs[{shown(name)}] = {shown(entry)} is not a dictionary. Pass one of "
            'keys and values, such as {"method": "pipeline"}.'
        )
    read = {key: _read_value(name, key, value) for key, value in entry.items()}
    if read.pop("atomic_gemm", False):
        raise ConfigurationError(
            f'ub_cfgs[{shown(name)}]["atomic_gemm"] = True, but cuBLAS 13 has no '
            "atomic GEMM. Leave it out; the other methods overlap as well."
        )
    if "is_reduce_scatter" in read:
        scatters = read.pop("is_reduce_scatter")
        comm_type = CommOverlapType.RS if scatters else CommOverlapType.AG
        if read.setdefault("comm_type", comm_type) is not comm_type:
            raise ConfigurationError(
                f"ub_cfgs[{shown(name)}] has is_reduce_scatter = {scatters}, but "
                f'comm_type = "{read["comm_type"].value}". Leave one of them out.'
            )
    return read


def _read_value(name, key, value):
    if key not in KEYS:
        raise UnknownNameError(
            f"ub_cfgs[{shown(name)}] has no key {shown(key)}. {nearest(key, KEYS)}"
        )
    read, words = KEYS[key]
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        found = f"ub_cfgs[{shown(name)}][{shown(key)}] = {shown(value)} is not"
        if key == "method" and isinstance(value, str):
            known = nearest(value, [method.value for method in Method])
            raise UnknownNameError(f"{found} a method. {known}") from None
        if isinstance(error, TypeError):
            raise ConfigurationTypeError(f"{found} {words}.") from None
        if is_integer(value):
            found = f"{found.removesuffix(' not')} out of range: it must be"
        raise ConfigurationError(f"{found} {words}.") from None


# Maps the names of passes in other libraries to the names in jax_ub, so that
# "fc1_forward" becomes "fc1_fprop".
_ALIASES = {"forward": FPROP, "fwd": FPROP, "backward": DGRAD, "bwd": DGRAD}


def with_known_pass(name: str) -> str:
    """Replaces an alias of a pass in an overlap's name: "fc1_forward" -> "fc1_fprop".

    The result, "fc1_fprop", serves to find the name that a user meant.
    """
    layer, _, direction = name.rpartition("_")
    return f"{layer}_{_ALIASES[direction]}" if direction in _ALIASES else name


def split_name(name: str) -> tuple[str, str]:
    """Splits the name of an overlap into layer and pass: "qkv_dgrad" -> "qkv", "dgrad".

    A name without a pass has the pass "fprop".
    """
    layer, _, direction = name.rpartition("_")
    return (layer, direction) if layer and direction in PASSES else (name, FPROP)
