"""The table of parallel modes: how a linear layer is sharded and what it communicates.

`tp` is the tensor-parallel mesh axis. A bulk collective overlaps a GEMM that does not
depend on it; every other collective moves an operand or the result of the GEMM that it
overlaps.

| parallel | sequence_parallel | x [tokens, features] | kernel [in, out] | bias | y |
|---|---|---|---|---|---|
| None | True | [tp, -] | [-, -] | - | [tp, -] |
| None | False | [-, -] | [-, -] | - | [-, -] |
| "column" | True | [tp, -] | [-, tp] | tp | [-, tp] |
| "column" | False | [-, -] | [-, tp] | tp | [-, tp] |
| "row" | True | [-, tp] | [tp, -] | - | [tp, -] |
| "row" | False | [-, tp] | [tp, -] | - | [-, -] |

| op | fprop | dgrad | wgrad |
|---|---|---|---|
| matmul, None | none | none | none |
| all_gather_matmul | AG | bulk AG of x, or RS | bulk RS of dx |
| matmul, "column" | none | RS | none |
| matmul_reduce_scatter | RS | AG | AG, unless the dgrad has gathered dy |
| matmul_all_reduce | RS | none | none |
"""

import dataclasses
import enum
from typing import Any

from jax.sharding import PartitionSpec

from jax_ub._src.errors import UnknownNameError, nearest, shown

COLUMN, ROW = PARALLEL = ("column", "row")
FPROP, DGRAD, WGRAD = PASSES = ("fprop", "dgrad", "wgrad")
# Names of a kernel's two dimensions: the input and the output features of the layer.
IN_OUT = ("in", "out")


class CommOverlapType(enum.Enum):
    """The collective that overlaps a GEMM: all-gather (`AG`) or reduce-scatter (`RS`).

    Each overlap that `initialize_ub` configures by name has such a type.

    Transformer Engine: `CommOverlapType`.
    """

    AG = "AG"
    RS = "RS"


@dataclasses.dataclass(frozen=True)
class Communication:
    """A collective that one pass of a layer can overlap with a GEMM.

    Attributes:
        comm_type: the collective.
        flag: the layer option of Transformer Engine that controls it, or "".
        is_bulk: whether the GEMM does not depend on the collective.
    """

    comm_type: CommOverlapType
    flag: str = ""
    is_bulk: bool = False

    def __str__(self) -> str:
        return f"{self.comm_type.value} ({'bulk' if self.is_bulk else 'not bulk'})"


_AG, _RS = CommOverlapType.AG, CommOverlapType.RS


@dataclasses.dataclass(frozen=True)
class KernelShards:
    """The mesh axes over which FSDP shards the kernels of a call in a `shard_map`.

    Attributes:
        axes: the mesh axes. Each rank along them has one shard.
        dim: the sharded dimension of a kernel as it is stored, 0 or 1.
    """

    axes: tuple[str, ...]
    dim: int


@dataclasses.dataclass(frozen=True)
class ParallelMode:
    """How a linear layer is parallelized: its shardings and its collectives.

    Layouts say for each dimension whether it is sharded over the tensor-parallel axis.

    Attributes:
        parallel: the sharded dimension of the kernel: "column" (out), "row" (in) or
            None (neither).
        sequence_parallel: whether activations whose features are not sharded have their
            tokens sharded.
        op: the primitive of the forward pass.
        x: layout of the activations, [tokens, features].
        kernel: layout of the kernel, [in, out]. The bias is sharded like "out".
        y: layout of the result, [tokens, features].
        fprop: what the forward pass may communicate; the first entry is the default.
        dgrad: what the dgrad may communicate.
        wgrad: what the wgrad may communicate.
    """

    parallel: str | None
    sequence_parallel: bool
    op: str
    x: tuple[bool, bool]
    kernel: tuple[bool, bool]
    y: tuple[bool, bool]
    fprop: tuple[Communication, ...] = ()
    dgrad: tuple[Communication, ...] = ()
    wgrad: tuple[Communication, ...] = ()

    def communications(self, direction: str) -> tuple[Communication, ...]:
        """Returns the collectives of one pass, which is "fprop", "dgrad" or "wgrad"."""
        return {FPROP: self.fprop, DGRAD: self.dgrad, WGRAD: self.wgrad}[direction]

    @property
    def function_name(self) -> str:
        """Returns the name of the public function for a layer, such as "linear".

        The name is "linear" if the forward pass communicates nothing, and otherwise the
        name of the op, such as "all_gather_matmul".
        """
        return "linear" if self.op == "matmul" else self.op

    @property
    def gathers_x(self) -> bool:
        """Returns whether the forward pass all-gathers x, the layer's activations."""
        return self.op == "all_gather_matmul"

    @property
    def sharded_dim(self) -> int | None:
        """Returns the index of the sharded dimension of a kernel [in, out], or None."""
        return self.kernel.index(True) if any(self.kernel) else None

    @property
    def sharded(self) -> str:
        """Returns the sharded dimension of a kernel: "in", "out" or "" (none)."""
        return "" if self.sharded_dim is None else IN_OUT[self.sharded_dim]

    def kernel_spec(self, axis_name: Any, other: Any = None) -> PartitionSpec:
        """Returns a kernel's `PartitionSpec`, for its dimensions [in, out].

        Args:
            axis_name: the tensor-parallel mesh axis, or a tuple of axes.
            other: the mesh axes that shard the first dimension that is left (FSDP).
        """
        entries = [axis_name if is_sharded else None for is_sharded in self.kernel]
        entries[self.kernel.index(False)] = other
        return PartitionSpec(*entries)


def _modes():
    row, column, replicated = (True, False), (False, True), (False, False)
    tokens, features = (True, False), (False, True)
    gather = Communication(_AG, "ub_overlap_ag")
    return (
        ParallelMode(None, True, "matmul", tokens, replicated, tokens),
        ParallelMode(None, False, "matmul", replicated, replicated, replicated),
        ParallelMode(
            *(COLUMN, True, "all_gather_matmul", tokens, column, features),
            fprop=(gather,),
            dgrad=(
                Communication(_AG, "ub_bulk_dgrad", is_bulk=True),
                Communication(_RS, "ub_overlap_rs_dgrad"),
            ),
            wgrad=(Communication(_RS, "ub_bulk_wgrad", is_bulk=True),),
        ),
        ParallelMode(
            *(COLUMN, False, "matmul", replicated, column, features),
            dgrad=(Communication(_RS),),
        ),
        ParallelMode(
            *(ROW, True, "matmul_reduce_scatter", features, row, tokens),
            fprop=(Communication(_RS, "ub_overlap_rs"),),
            dgrad=(gather,),
            wgrad=(Communication(_AG),),
        ),
        ParallelMode(
            *(ROW, False, "matmul_all_reduce", features, row, replicated),
            fprop=(Communication(_RS),),
        ),
    )


MODES = {(mode.parallel, mode.sequence_parallel): mode for mode in _modes()}
# Maps each op that overlaps a GEMM with communication to its parallel mode.
OVERLAPPED = {mode.op: mode for mode in MODES.values() if mode.fprop}


def mode_of(parallel: str | None, sequence_parallel: bool) -> ParallelMode:
    return MODES[parallel, bool(sequence_parallel)]


def check_parallel(op: str, name: str, value: Any) -> None:
    """Raises an error unless the value of option `name` is "column" or "row"."""
    if not isinstance(value, str) or value not in PARALLEL:
        raise UnknownNameError(
            f"{op}: {name} = {shown(value)} is not a way to shard a kernel. "
            f"{nearest(value, PARALLEL)} None does not shard it."
        )
