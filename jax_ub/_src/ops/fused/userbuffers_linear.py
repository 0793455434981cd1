"""Finds and checks the linears whose communication can overlap with a GEMM.

Transformer Engine's three patterns, in forward order:

| | operations | runs as |
|---|---|---|
| 1 | `BasicLinear("column")`, optional `Bias` | AG+GEMM |
| 2 | `BasicLinear("row")`; a `Bias` after it runs separately | GEMM+RS |
| 3 | `BasicLinear(None)`, optional `Bias`, `ReduceScatter` | GEMM+RS |
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src import dtypes
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.methods import Method
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.basic.reduce_scatter import ReduceScatter
from jax_ub._src.ops.fused.parts import Part, collect, present
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    fuse_windows,
    num_ranks,
)
from jax_ub._src.parallel import PARALLEL, mode_of
from jax_ub._src.rules.call_config import CallConfig, make_call_config


def match(ops: Sequence[Op]) -> tuple[BasicOperation, ...] | str | None:
    """Finds the operations that run as one overlapped linear, at the front of `ops`.

    They are a linear with `userbuffers_options` and, in some patterns, the bias and the
    reduce-scatter after it.

    Returns:
        The matching operations; or the reason why a linear does not match; or None if
        `ops` does not start with a linear.
    """
    linear = ops[0]
    if not isinstance(linear, BasicLinear):
        return None
    if linear.comm_name is None:
        return 'no userbuffers_options={"comm_name": ...}'
    mode = linear.tensor_parallel_mode
    bias = () if mode == "row" else tuple(o for o in ops[1:2] if isinstance(o, Bias))
    window: tuple[BasicOperation, ...] = (linear, *bias)
    axis_name = linear.axis_name
    if mode is None:
        behind = ops[len(window) : len(window) + 1]
        if not behind or not isinstance(behind[0], ReduceScatter):
            return "tensor_parallel_mode=None and no ReduceScatter behind it"
        window = (*window, behind[0])
        axis_name = behind[0].axis_name
    if num_ranks(axis_name) == 1:
        return f"axis {shown(axis_name)} has one rank"
    return window


@dataclasses.dataclass(frozen=True)
class UserbuffersLinear(FusedOperation):
    """Base class of linears whose GEMM and collective overlap.

    It replaces a `BasicLinear` and, in some patterns, the `Bias` and the
    `ReduceScatter` after it.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        bias: Bias | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ):
        """Takes linear, bias and reduce-scatter as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: the linear, with `userbuffers_options`.
            bias: the bias after a linear whose mode is "column" or None.
            reduce_scatter: the reduce-scatter after a linear whose mode is None.

        Raises:
            ShapeContractError: if the operations match none of the three patterns.
        """
        op = type(self).__name__
        parts = collect(
            op,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("bias", Bias, bias, is_optional=True),
            Part("reduce_scatter", ReduceScatter, reduce_scatter, is_optional=True),
        )
        _check_pattern(op, *parts)
        super().__init__(present(*parts))

    @property
    def overlaps(self):
        """True: the linear's collective runs at the same time as its GEMM."""
        return True

    @classmethod
    def refusals(cls, ops: Sequence[Op]) -> dict[int, str]:
        """Maps the index of each linear that cannot overlap to the reason."""
        found = {i: match(ops[i:]) for i in range(len(ops))}
        return {i: reason for i, reason in found.items() if isinstance(reason, str)}

    @classmethod
    def fuse(cls, ops: Sequence[Op]) -> list[Op]:
        """Replaces each linear that can overlap by an instance of this class.

        The bias or the reduce-scatter that runs with the linear is replaced too.
        """

        def match_front(rest):
            window = match(rest)
            return cls(window) if isinstance(window, tuple) else None

        return fuse_windows(ops, match_front)


def _check_pattern(op, linear, bias, reduce_scatter):
    """Checks that linear, bias and reduce-scatter can run as one overlapped call."""
    mode = linear.tensor_parallel_mode
    reason = None
    if linear.comm_name is None:
        reason = (
            "linear has no userbuffers_options. Pass "
            'userbuffers_options={"comm_name": "qkv"} to ops.BasicLinear'
        )
    elif mode is None and reduce_scatter is None:
        reason = (
            "linear has tensor_parallel_mode = None and communicates nothing. Pass "
            'reduce_scatter=ops.ReduceScatter(), or tensor_parallel_mode="column" or '
            '"row" to ops.BasicLinear'
        )
    elif mode is not None and reduce_scatter is not None:
        reason = (
            f'linear has tensor_parallel_mode = "{mode}", but reduce_scatter belongs '
            "behind a linear whose mode is None. Pass reduce_scatter=None"
        )
    elif mode == "row" and bias is not None:
        reason = (
            'linear has tensor_parallel_mode = "row", whose bias is added once, after '
            "the reduce-scatter. Pass bias=None, and put the Bias behind this "
            "operation"
        )
    if reason is not None:
        raise ShapeContractError(f"{op}: {reason}.")


@dataclasses.dataclass(frozen=True)
class Window:
    """The linear, bias and reduce-scatter that run as one overlapped call.

    Bias and reduce-scatter are None if they are absent.
    """

    linear: BasicLinear
    bias: Bias | None
    reduce_scatter: ReduceScatter | None

    @classmethod
    def of(cls, basic_ops: Sequence[BasicOperation]) -> "Window":
        """Finds linear, bias and reduce-scatter among `basic_ops` by their types."""
        bias = [op for op in basic_ops if isinstance(op, Bias)]
        scatter = [op for op in basic_ops if isinstance(op, ReduceScatter)]
        linear = basic_ops[0]
        assert isinstance(linear, BasicLinear)
        return cls(linear, (*bias, None)[0], (*scatter, None)[0])

    @property
    def mode(self) -> str:
        """The mode "column" or "row"; "row" for a linear and a `ReduceScatter`."""
        return self.linear.tensor_parallel_mode or "row"

    def call_config(
        self, op: str, dtype: DTypeLike, *, is_backward: bool = False
    ) -> CallConfig:
        """Returns the ranks, the method and the dtype of the overlapped call."""
        linear, scatter = self.linear, self.reduce_scatter
        return open_linear(
            op,
            self.mode,
            linear.axis_name if scatter is None else scatter.axis_name,
            linear.sequence_parallel or scatter is not None,
            linear.comm_name,
            dict(linear.userbuffers_options).get("method", linear.method),
            dtype,
            is_backward=is_backward,
        )


def open_linear(
    op: str,
    tensor_parallel_mode: str | None,
    axis_name: str | tuple[str, ...] | None,
    sequence_parallel: bool,
    ub_comm_name: str | None,
    method: Method | str | None,
    dtype: DTypeLike,
    *,
    is_backward: bool = False,
) -> CallConfig:
    """Returns the ranks, method and dtype of an overlapped linear, after checks.

    Raises:
        UnknownNameError: if the mode is unknown.
        UnsupportedOverlapError: if `sequence_parallel` is False.
        ShapeContractError: if the dtype is not f32, bf16 or f16, or the axis is not a
            manual mesh axis.
    """
    parallel = tensor_parallel_mode
    if not isinstance(parallel, str) or parallel not in PARALLEL:
        raise UnknownNameError(
            f"{op}: tensor_parallel_mode = {shown(parallel)} does not "
            f"shard a kernel. {nearest(parallel, PARALLEL)}"
        )
    shapes.check_flag(op, "sequence_parallel", sequence_parallel)
    if not sequence_parallel:
        raise UnsupportedOverlapError(
            f"{op}: sequence_parallel = False, but only a gather or a scatter of rows "
            "is overlapped. Pass sequence_parallel=True, or leave userbuffers_options "
            "out."
        )
    if axis_name is None:
        raise ShapeContractError(
            f"{op}: tensor_parallel_mode = {shown(parallel)} needs the mesh "
            'axis of its ranks, but axis_name = None. Pass it, for example "tp".'
        )
    mode = mode_of(parallel, True)
    may_be_bulk = is_backward and any(one.is_bulk for one in mode.dgrad)
    call_config = make_call_config(
        op, axis_name, ub_comm_name, method, mode=mode, may_be_bulk=may_be_bulk
    )
    found = shapes.dtype_of(dtype)
    if found not in dtypes.OPERANDS:
        given = shown(dtype) if found is None else found
        raise ShapeContractError(
            f"{call_config.label}: dtype = {given}, but the op computes in "
            f"{dtypes.listed(dtypes.OPERANDS)}. Pass one of these."
        )
    return call_config.with_dtypes(dtype, dtype)


def check_activation(call_config: CallConfig, name: str, array: jax.Array) -> None:
    """Checks that an activation is a non-empty float array of at least rank 2."""
    shapes.check_float(call_config.label, **{name: array})
    shapes.check_rank(call_config.label, name, array)
    shapes.check_not_empty(call_config.label, name, array)
