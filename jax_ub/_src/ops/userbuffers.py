"""Forward of linears whose GEMM overlaps with their collective, and their patterns.

Transformer Engine's three patterns, in forward order:

| | operations | forward |
|---|---|---|
| 1 | `BasicLinear("column")`, optional `Bias` | AG+GEMM |
| 2 | `BasicLinear("row")`; a `Bias` after it runs separately | GEMM+RS |
| 3 | `BasicLinear(None)`, optional `Bias`, `ReduceScatter` | GEMM+RS |
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ub._src import arguments, checks, dtypes
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub._src.fp8.recipes import Recipe
from jax_ub._src.methods import Method
from jax_ub._src.ops.basic import Bias, ReduceScatter
from jax_ub._src.ops.fused_operation import (
    ForwardPattern,
    FusedPattern,
    Op,
    pattern_field,
)
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.operation import BasicOperation, compute_dtype, num_ranks
from jax_ub._src.parallel import ROW, check_parallel, mode_of
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_reduce
from jax_ub._src.rules.call_config import CallConfig, make_call_config
from jax_ub._src.rules.forward import forward_of
from jax_ub._src.rules.operands import pcast_operands


def match(ops: Sequence[Op]) -> tuple[tuple[BasicOperation, ...], str]:
    """Returns the longest start of the list `ops` that one overlapped call can run.

    The result is () if no overlapped call matches. The second result is then the
    reason, if the first operation is a linear.
    """
    linear = ops[0]
    if not isinstance(linear, BasicLinear):
        return (), ""
    if linear.comm_name is None:
        return (), 'no userbuffers_options={"comm_name": ...}'
    axis_name, window = linear.axis_name, list[BasicOperation]([linear])
    if linear.tensor_parallel_mode != ROW:
        window += [op for op in ops[1:2] if isinstance(op, Bias)]
    if linear.tensor_parallel_mode is None:
        scatter = next(iter(ops[len(window) :]), None)
        if not isinstance(scatter, ReduceScatter):
            return (), "tensor_parallel_mode=None and no ReduceScatter after it"
        axis_name = scatter.axis_name
        window.append(scatter)
    if num_ranks(axis_name) == 1:
        return (), f"axis {shown(axis_name)} has one rank"
    return tuple(window), ""


@dataclasses.dataclass(frozen=True)
class UserbuffersLinear(FusedPattern):
    """Base class of linears whose GEMM overlaps an all-gather or reduce-scatter.

    Attributes:
        linear: the linear, with `userbuffers_options`.
        bias: the bias after a linear whose mode is "column" or None.
        reduce_scatter: the reduce-scatter after a linear whose mode is None.
    """

    linear: BasicLinear = pattern_field(BasicLinear)
    bias: Bias | None = pattern_field(Bias, is_optional=True)
    reduce_scatter: ReduceScatter | None = pattern_field(
        ReduceScatter, is_optional=True
    )

    @classmethod
    def mismatch(cls, linear, bias, reduce_scatter):
        mode = linear.tensor_parallel_mode
        if linear.comm_name is None:
            return (
                "linear has no userbuffers_options. Pass "
                'userbuffers_options={"comm_name": "qkv"} to ops.BasicLinear'
            )
        if mode is None and reduce_scatter is None:
            return (
                "linear has tensor_parallel_mode = None and communicates nothing. Pass "
                'reduce_scatter=ops.ReduceScatter(), or tensor_parallel_mode="column" '
                'or "row" to ops.BasicLinear'
            )
        if mode is not None and reduce_scatter is not None:
            return (
                f'linear has tensor_parallel_mode = "{mode}", but a reduce_scatter may '
                "follow only a linear whose mode is None. Pass reduce_scatter=None"
            )
        if mode == ROW and bias is not None:
            return (
                'linear has tensor_parallel_mode = "row", whose bias is added once, '
                "after the reduce-scatter. Pass bias=None, and put the Bias after this "
                "operation"
            )
        return ""

    @property
    def tensor_parallel_mode(self) -> str:
        """Returns "column" for an overlapped all-gather, "row" for a reduce-scatter."""
        return self.linear.tensor_parallel_mode or ROW

    @property
    def overlaps(self):
        return True

    def call_config(self, dtype: DTypeLike) -> CallConfig:
        linear, scatter = self.linear, self.reduce_scatter
        return overlapped_call_config(
            type(self).__name__,
            self.tensor_parallel_mode,
            linear.axis_name if scatter is None else scatter.axis_name,
            linear.sequence_parallel or scatter is not None,
            linear.comm_name,
            linear.chosen_method,
            dtype,
            is_backward=self.overrides("backward"),
            fp8=linear.fp8,
        )

    @classmethod
    def unfused_reasons(cls, ops: Sequence[Op]) -> dict[int, str]:
        reasons = {i: match(ops[i:])[1] for i in range(len(ops))}
        return {i: reason for i, reason in reasons.items() if reason}

    @classmethod
    def replacement(cls, ops: Sequence[Op]) -> "UserbuffersLinear | None":
        window, _ = match(ops)
        return cls(window) if window else None


def overlapped_call_config(  # noqa: PLR0913, options of a linear
    op: str,
    parallel: str | None,
    axis_name: str | tuple[str, ...] | None,
    sequence_parallel: bool,
    ub_comm_name: str | None,
    method: Method | str | None,
    dtype: DTypeLike,
    *,
    is_backward: bool = False,
    fp8: Recipe | None = None,
) -> CallConfig:
    """Checks the options of an overlapped linear; returns them as a `CallConfig`."""
    check_parallel(op, "tensor_parallel_mode", parallel)
    checks.check_flag(op, "sequence_parallel", sequence_parallel)
    arguments.check(op, ub_comm_name=ub_comm_name)
    if not sequence_parallel:
        raise UnsupportedOverlapError(
            f"{op}: sequence_parallel = False, but only all-gathers and "
            "reduce-scatters of rows are overlapped. Pass sequence_parallel=True, "
            "or leave out userbuffers_options."
        )
    if axis_name is None:
        raise ShapeContractError(
            f"{op}: tensor_parallel_mode = {shown(parallel)} needs the mesh axis of "
            'the ranks, but axis_name = None. Pass it, for example "tp".'
        )
    mode = mode_of(parallel, True)
    config = make_call_config(
        *(op, axis_name, ub_comm_name, method),
        mode=mode,
        may_be_bulk=is_backward and any(one.is_bulk for one in mode.dgrad),
        is_fp8=fp8 is not None,
    )
    found = checks.dtype_of(dtype)
    if found not in dtypes.OPERANDS:
        given = shown(dtype) if found is None else found
        raise ShapeContractError(
            f"{config.label}: dtype = {given}, but the op computes in "
            f"{dtypes.listed(dtypes.OPERANDS)}. Pass one of these."
        )
    return dataclasses.replace(config, fp8=fp8).with_dtypes(dtype, dtype)


@dataclasses.dataclass(frozen=True)
class UserbuffersForwardLinear(UserbuffersLinear, ForwardPattern):
    """Computes a linear layer whose GEMM overlaps its all-gather or reduce-scatter.

    Replaces a linear, and the bias and the reduce-scatter after it. This saves the
    buffer of the gathered input, or of the product before the scatter, and the pass
    that adds the bias.

    Transformer Engine: `UserbuffersForwardLinear`.
    """

    @staticmethod
    def functional_forward(  # noqa: PLR0913, Transformer Engine's names
        input: jax.Array,
        weight: jax.Array,
        *,
        bias: jax.Array | None = None,
        tensor_parallel_mode: str,
        axis_name: str | tuple[str, ...],
        sequence_parallel: bool = True,
        ub_comm_name: str | None = None,
        method: Method | str | None = None,
        dtype: DTypeLike | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes all-gather + GEMM ("column") or GEMM + reduce-scatter ("row").

        It is called inside `jax.shard_map`, and is not differentiable.

        | mode | input | weight | bias | result |
        |---|---|---|---|---|
        | "column" | `[..., M/P, K]` | `[K, N/P]` | `[N/P]` | `[..., M, N/P]` |
        | "row" | `[..., M, K/P]` | `[K/P, N]` | `[N]` | `[..., M/P, N]` |

        Args:
            input: activations.
            weight: kernel, `[in, out]`.
            bias: for "row", each rank passes its own bias and the sum over the ranks is
                added, as if each rank added its bias before the reduce-scatter.
            tensor_parallel_mode: "column" or "row".
            axis_name: the mesh axis of the P ranks.
            sequence_parallel: must be True; only collectives of rows are overlapped.
            ub_comm_name: name of the overlap configuration; also in error messages.
            method: how GEMM and communication overlap. None takes the method that is
                configured for `ub_comm_name`, else `JAX_UB_METHOD`, else "auto";
                `JAX_UB_METHOD=xla` takes precedence over the configuration.
            dtype: dtype of the computation and the result; None takes the dtype of
                `weight`.

        Returns:
            The result, and the operands {"input": ..., "weight": ...} in the dtype of
            the computation, for `UserbuffersBackwardLinear.functional_backward`.

        Raises:
            ShapeContractError: if the shapes do not match each other or the mesh.
            UnknownNameError: if the mode or the method is unknown.
            UnsupportedOverlapError: if `sequence_parallel` is False, or if an
                explicitly requested method cannot run here.
        """
        op, mode = "UserbuffersForwardLinear", tensor_parallel_mode
        checks.check_array(op, "weight", weight)
        if dtype is None:
            checks.check_float(op, weight=weight)
            dtype = weight.dtype
        config = overlapped_call_config(
            op, mode, axis_name, sequence_parallel, ub_comm_name, method, dtype
        )
        check_weight(config, weight)
        check_input(config, input, weight)
        checks.check_addends(config.label, bias, None, weight.shape[1:])
        x, w = input.astype(config.dtype), weight.astype(config.dtype)
        (y,), _ = forward_of(config)(config, *_forward_operands(config, x, w, bias))
        return y, {"input": x, "weight": w}

    def forward(
        self,
        params,
        x,
        extra_inputs,
        saves,
        *,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        out_dtype: DTypeLike | None = None,
    ):
        """Computes the linear, its bias and its collective in one overlapped call.

        `bias`, `[N]`, and `residual`, of the shape of the result, are added once, after
        a reduce-scatter. `out_dtype` is the dtype of the result; None takes the dtype
        of the last operation. Only the linear has residuals.
        """
        config = self.call_config(compute_dtype(self.linear.dtype, x))
        x, w, residuals = self.linear.operands(config, params[0], x)
        own_bias = None if self.bias is None else params[1]["bias"]
        if out_dtype is None and self.bias is not None:
            out_dtype = self.bias.dtype
        config = config.with_dtypes(config.dtype, out_dtype)
        checks.check_addends(config.label, own_bias, None, w.shape[1:])
        operands = _forward_operands(config, x, w, own_bias, bias, residual)
        (y,), _ = forward_of(config)(config, *operands)
        num = len(self.basic_ops)
        return y, ((),) * num, (residuals, *({},) * (num - 1))


def check_weight(config, w):
    checks.check_float(config.label, weight=w)
    checks.check_kernel(config.label, "weight", w)


def check_input(config, x, w):
    """Checks the input x, and if w is given, that x and w have the same K."""
    check_activation(config, "input", x)
    if w is not None:
        num_ranks, sharded = config.num_ranks, config.mode.sharded
        checks.check_contraction(config.label, x, w, num_ranks, sharded)
    if not config.mode.gathers_x:
        checks.check_divides(config.label, x, config.num_ranks)


def check_activation(config, name, array):
    checks.check_float(config.label, **{name: array})
    checks.check_rank(config.label, name, array)
    checks.check_not_empty(config.label, name, array)


def _forward_operands(config, x, w, bias, added_bias=None, residual=None):
    """Sums the biases, and casts all operands to vary over the same mesh axes."""
    axes = config.axes(x, w, bias, added_bias, residual)
    if not config.mode.gathers_x and bias is not None:
        # In the unfused operations, each rank adds its bias before the reduce-scatter,
        # which sums the biases of all ranks. The engine adds a single bias after the
        # reduce-scatter: the sum of these biases.
        bias = bias.astype(jnp.float32)
        is_varying = bool(vma.axes_of(bias) & frozenset(config.axis_name))
        if config.is_vma_checked and not is_varying:
            bias = bias * config.num_ranks
        else:
            bias = all_reduce(config.collective, bias)
    if added_bias is not None:
        added_bias = added_bias.astype(jnp.float32)
        bias = added_bias if bias is None else bias.astype(jnp.float32) + added_bias
    biases = None if bias is None else (bias,)
    return pcast_operands((x, (w,), biases, residual), axes)
