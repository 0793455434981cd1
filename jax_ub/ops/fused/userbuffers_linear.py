"""Patterns, checks and call configuration of the two Userbuffers linears.

Transformer Engine's three patterns, in forward order; each may begin a window:

| | operations | runs |
|---|---|---|
| 1 | `BasicLinear("column")`, `Bias` where there is one | AG+GEMM |
| 2 | `BasicLinear("row")` | GEMM+RS; a `Bias` behind it stays by itself |
| 3 | `BasicLinear(None)`, `Bias` where there is one, `ReduceScatter` | GEMM+RS |
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from jax_ub import shapes
from jax_ub.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.methods import Method
from jax_ub.ops.basic.basic_linear import BasicLinear
from jax_ub.ops.basic.bias import Bias
from jax_ub.ops.basic.reduce_scatter import ReduceScatter
from jax_ub.ops.fused.parts import Part, collect, present
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    fuse_windows,
    num_ranks,
)
from jax_ub.rules.call_config import CallConfig, make_call_config

# The public function that communicates as each mode does.
LIKE = {"column": "all_gather_matmul", "row": "matmul_reduce_scatter"}
MODES = tuple(LIKE)


def match(ops: Sequence[Op]) -> tuple[BasicOperation, ...] | str | None:
    """Looks for a pattern at the front of `ops`.

    Returns:
        The window; or why the linear there is none; or None where there is no linear.
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
    """A window that is one of the patterns."""

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        bias: Bias | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ):
        """Makes the operation of its parts, or of a tuple of them in forward order.

        Args:
            basic_ops: the parts in forward order, in the place of the keywords.
            linear: the linear, with `userbuffers_options`.
            bias: what is added behind a linear whose mode is "column" or None.
            reduce_scatter: what scatters the result of a linear whose mode is None.

        Raises:
            ShapeContractError: if the parts are none of the three patterns.
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
        """Yes."""
        return True

    @classmethod
    def refusals(cls, ops: Sequence[Op]) -> dict[int, str]:
        """Why linears stay as they are, by their index."""
        found = {i: match(ops[i:]) for i in range(len(ops))}
        return {i: reason for i, reason in found.items() if isinstance(reason, str)}

    @classmethod
    def fuse(cls, ops: Sequence[Op]) -> list[Op]:
        """Replaces every pattern by an operation of this class."""

        def match_front(rest):
            window = match(rest)
            return cls(window) if isinstance(window, tuple) else None

        return fuse_windows(ops, match_front)


def _check_pattern(op, linear, bias, reduce_scatter):
    """Checks that the operations are one of the three patterns."""
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
    """What a window of basic operations computes together."""

    linear: BasicLinear
    bias: Bias | None
    reduce_scatter: ReduceScatter | None

    @classmethod
    def of(cls, basic_ops: Sequence[BasicOperation]) -> "Window":
        """Tells the operations of a window apart."""
        bias = [op for op in basic_ops if isinstance(op, Bias)]
        scatter = [op for op in basic_ops if isinstance(op, ReduceScatter)]
        linear = basic_ops[0]
        assert isinstance(linear, BasicLinear)
        return cls(linear, (*bias, None)[0], (*scatter, None)[0])

    @property
    def mode(self) -> str:
        """How it is parallel: a `ReduceScatter` makes it "row"."""
        return self.linear.tensor_parallel_mode or "row"

    def call_config(
        self, op: str, dtype: DTypeLike, *, is_backward: bool = False
    ) -> CallConfig:
        """Where it runs."""
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
    """Checks how a linear is parallel, and finds its ranks and its method.

    Raises:
        UnknownNameError: if there is no such mode.
        UnsupportedOverlapError: without sequence parallelism.
        ShapeContractError: if the dtype is no f32, bf16 or f16, or the axis no manual
            mesh axis.
    """
    mode = tensor_parallel_mode
    if not isinstance(mode, str) or mode not in MODES:
        raise UnknownNameError(
            f"{op}: tensor_parallel_mode = {shown(mode)} does not "
            f"shard a kernel. {nearest(mode, MODES)}"
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
            f"{op}: tensor_parallel_mode = {shown(mode)} needs the mesh "
            'axis of its ranks, but axis_name = None. Pass it, for example "tp".'
        )
    like = LIKE[mode]
    may_be_bulk = is_backward and tensor_parallel_mode == "column"
    call_config = make_call_config(
        op, axis_name, ub_comm_name, method, like=like, may_be_bulk=may_be_bulk
    )
    found = shapes.dtype_of(dtype)
    if found not in shapes.FLOATS:
        given = shown(dtype) if found is None else found
        raise ShapeContractError(
            f"{call_config.label}: dtype = {given}, but the op computes in float32, "
            f"bfloat16 "
            "or float16. Pass one of these."
        )
    return call_config.with_dtypes(dtype, dtype)


def check_activation(call_config: CallConfig, name: str, array: jax.Array) -> None:
    """Checks what every activation of the functional interface has to be."""
    shapes.check_float(call_config.label, **{name: array})
    shapes.check_rank(call_config.label, name, array)
    shapes.check_not_empty(call_config.label, name, array)
