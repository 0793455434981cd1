"""The methods that overlap GEMM and communication, and their options."""

import dataclasses
import enum
from typing import NoReturn

from jax_ub._src.errors import UnknownNameError, UnsupportedOverlapError, nearest, shown


class Method(enum.Enum):
    """How an op combines its GEMM with its communication.

    `AUTO` lets jax_ub choose, and falls back to `XLA` where the engine cannot run.
    `DIRECT` reads operands directly from the peers' memory. `RING_EXCHANGE` and
    `PIPELINE` move chunks through slots while other chunks are multiplied. `BULK`
    overlaps communication with a GEMM that does not depend on it. `EXTERNAL`
    communicates before or after the GEMM. `XLA` is plain `jax.lax`, the reference.

    Transformer Engine: `ring_exchange`, `pipeline`, `bulk` and `external` of `ub_cfgs`.
    """

    AUTO = "auto"
    DIRECT = "direct"
    RING_EXCHANGE = "ring_exchange"
    PIPELINE = "pipeline"
    BULK = "bulk"
    EXTERNAL = "external"
    XLA = "xla"

    @property
    def materializes_gather(self) -> bool:
        """Returns whether the method stores gathered rows, so that they can be reused.

        The other methods read the rows directly from the peers' memory at each use.
        """
        return self not in (Method.AUTO, Method.DIRECT)

    @property
    def forward(self) -> "Method":
        """Returns this method, or "ring_exchange" for "bulk", in a forward pass.

        `BULK` overlaps a collective with an independent GEMM. A forward pass has none:
        its GEMM reads what the collective gathers, or computes what it sums.
        """
        return Method.RING_EXCHANGE if self is Method.BULK else self

    @property
    def code(self) -> int:
        """Returns the number of this method in the C++ engine."""
        return _CODES[self]


class Variant(enum.Enum):
    """The order in which a method sends chunks and runs GEMMs on them.

    `AGGREGATE` multiplies the chunks of two ranks in one GEMM, in a ring all-gather.
    `OVERLAP_FIRST_GEMM` sends a split of a pipelined reduce-scatter after the GEMM of
    the next split. `ONE_SHOT` is an all-reduce in one exchange, in which each rank sums
    all elements.
    """

    PLAIN = "plain"
    AGGREGATE = "aggregate"
    OVERLAP_FIRST_GEMM = "overlap_first_gemm"
    ONE_SHOT = "one_shot"

    @property
    def code(self) -> int:
        """Returns the number of this variant in the C++ engine."""
        return list(Variant).index(self)


def has_pairs(num_ranks: int) -> bool:
    """Returns whether `Variant.AGGREGATE` can form at least two pairs of ranks."""
    return num_ranks > 2 and num_ranks % 2 == 0


# Default of `num_splits`, the number of parts into which method "pipeline" splits a
# rank's chunk. All-gathers on GPUs do not split chunks by default. The value must equal
# `kDefaultSplits` in csrc/schedule/schedule.h.
DEFAULT_SPLITS = 4

# Maps methods to their numbers in FFI attributes, which must equal the numbers of
# `Method` in csrc/schedule/schedule.h. The engine has neither "auto" nor "xla".
_CODES = {
    Method.DIRECT: 0,
    Method.RING_EXCHANGE: 1,
    Method.PIPELINE: 2,
    Method.BULK: 3,
    Method.EXTERNAL: 4,
}


def auto_on_gpus(*, gathers: bool) -> Method:
    """Returns the method by which the CUDA engine runs a call with method "auto".

    The engine pushes all chunks into the peers' slots, so "auto" never becomes
    "direct". An all-gather becomes "pipeline": each rank sends its rows to all peers,
    nearest first, as one chunk. A reduction becomes "ring_exchange": partial sums go to
    the rank that owns the rows.
    """
    return Method.PIPELINE if gathers else Method.RING_EXCHANGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Options of a method: the variant of its schedule, and GPU launch parameters.

    Results do not depend on them, with one exception: `sm_margin` and `gemm_algorithm`
    may change the order in which a GEMM sums.

    Attributes:
        use_ce: whether copy engines send the data. Otherwise kernels do.
        num_sm: number of thread blocks of the kernels that send; 0 lets the engine
            choose.
        cga_size: cluster size of the kernels that send; 0 means no clusters.
        sm_margin: number of multiprocessors that cuBLASLt leaves free when it plans the
            GEMMs of calls that communicate.
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
    sm_margin: int = 4
    num_lanes: int = 2
    gemm_algorithm: int = 0
    comm_priority: int = 0
    gemm_priority: int = 0
    variant: Variant = Variant.PLAIN

    def attributes(self) -> dict[str, int]:
        """Returns the GPU launch parameters as FFI attributes: {name: integer}."""
        fields = dataclasses.asdict(self)
        del fields["variant"]
        return {name: int(value) for name, value in fields.items()}

    def differences(self) -> dict[str, bool | int | str]:
        """Returns a dict of the options that differ from their defaults."""
        return {
            field.name: value.value if isinstance(value, Variant) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclasses.dataclass(frozen=True)
class PallasTiles:
    """Tile sizes of JAX's Pallas kernel, which overlaps an all-gather with a GEMM.

    Attributes:
        rows: rows of the tile of a warpgroup.
        columns: columns of the tile of a warpgroup.
        doubled: the dimension, "M" or "N", along which a thread block has two tiles.
        minor: the dimension, "M" or "N", along which the next thread block is.
    """

    rows: int
    columns: int
    doubled: str
    minor: str

    def divide(self, rows: int, columns: int) -> bool:
        """Returns whether thread blocks divide a rank's `rows` and `columns` evenly."""
        block_rows = self.rows * (1 + (self.doubled == "M"))
        block_columns = self.columns * (1 + (self.doubled == "N"))
        return rows % block_rows == columns % block_columns == 0

    def __str__(self) -> str:
        """Returns, for example, "two tiles of 128 x 64 along N, grid along M first"."""
        tiles = f"two tiles of {self.rows} x {self.columns} along {self.doubled}"
        return f"{tiles}, grid along {self.minor} first"


# The tile sizes of the Pallas kernel that the commands `tune` and `bench` time. A tuned
# file may contain no other tile sizes.
PALLAS_TILES = tuple(
    PallasTiles(rows, columns, doubled, minor)
    for rows, columns, doubled in ((128, 128, "N"), (128, 128, "M"), (128, 64, "N"))
    for minor in "MN"
)


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """The method and options by which a call overlaps its GEMM and its collective.

    Attributes:
        method: the method.
        num_splits: number of splits of a rank's chunk, for "pipeline"; 0 lets the
            engine choose.
        kernel_options: the schedule's variant, and launch options for GPUs.
        sends_fp8: whether wide arrays and partial sums are sent as FP8.
        pallas: tiles of JAX's Pallas kernel, which runs an AG+GEMM in place of `method`
            where it can; None never runs it.
        is_explicit: whether the user chose the method: by the call's argument, by the
            configuration of its name or by `JAX_UB_METHOD`. Otherwise it comes from a
            tuned file, or is Transformer Engine's default for a name that the user has
            not configured.
        is_from_environment: whether it is explicit by `JAX_UB_METHOD`.
    """

    method: Method
    num_splits: int = 0
    kernel_options: KernelOptions = KernelOptions()
    sends_fp8: bool = False
    pallas: PallasTiles | None = dataclasses.field(default=None, kw_only=True)
    is_explicit: bool = dataclasses.field(default=True, kw_only=True)
    is_from_environment: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def may_fall_back(self) -> bool:
        """Returns whether a call that the engine cannot run falls back to `jax.lax`."""
        return self.method is Method.AUTO or not self.is_explicit

    def with_method(self, method: Method) -> "MethodChoice":
        """Returns a copy with another method. Only "pipeline" keeps `num_splits`."""
        num_splits = self.num_splits if method is Method.PIPELINE else 0
        is_explicit = not self.may_fall_back
        return dataclasses.replace(
            self, method=method, num_splits=num_splits, is_explicit=is_explicit
        )

    @property
    def for_local_gemm(self) -> "MethodChoice":
        """Returns the `MethodChoice` for the local GEMMs of a call with this choice.

        A local GEMM communicates nothing, so all methods of the engine run it alike.
        """
        runs_alike = self.method not in (Method.AUTO, Method.XLA)
        method = Method.DIRECT if runs_alike else self.method
        return MethodChoice(method, is_explicit=self.is_explicit)

    def __str__(self) -> str:
        """Returns method and options as text, such as "pipeline, num_splits 4"."""
        words = [self.method.value]
        if self.num_splits:
            words.append(f"num_splits {self.num_splits}")
        options = self.kernel_options.differences()
        words += [f"{name} {value}" for name, value in options.items()]
        text = ", ".join(words)
        return text if self.pallas is None else f"pallas ({self.pallas}), else {text}"


def resolve(op: str, method: "Method | str | None", default: str | None) -> Method:
    """Returns the method that the user has chosen by argument or environment variable.

    Args:
        op: the op's name, for errors.
        method: the call's argument; None takes `default`.
        default: the value of `JAX_UB_METHOD`; None is "auto".
    """
    if isinstance(method, Method):
        return method
    source = "method" if method is not None else "JAX_UB_METHOD"
    name = method if method is not None else default
    if name is None:
        return Method.AUTO
    names = [known.value for known in Method]
    if not isinstance(name, str):
        raise UnknownNameError(
            f"{op}: {source} = {shown(name)} is of type {type(name).__name__}, not the "
            f"name of a method. {nearest('', names)}"
        )
    if name not in names:
        raise UnknownNameError(
            f"{op}: {source} = {shown(name)} is not a method. {nearest(name, names)}"
        )
    return Method(name)


def refuse_bulk(op: str, source: str) -> NoReturn:
    """Raises the error for "bulk" in a call whose GEMM depends on its collective."""
    raise UnsupportedOverlapError(
        f'{op}: {source} = "bulk" communicates during a GEMM that does not depend on '
        "the communication. Only the backward pass of a column-parallel layer has such "
        'a GEMM. Use "ring_exchange", "pipeline", "external" or "auto", or configure '
        "the backward pass of a named layer: "
        'initialize_ub(ub_cfgs={"qkv_dgrad": {"method": "bulk"}, '
        '"qkv_wgrad": {"method": "bulk"}}) and ub_name="qkv".'
    )
