"""Forward of a linear whose GEMM runs at the same time as its collective."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.methods import Method
from jax_ub._src.ops.fused import userbuffers_linear as userbuffers
from jax_ub._src.ops.operation import (
    BasicOperation,
    Op,
    Params,
    Residuals,
    compute_dtype,
)
from jax_ub._src.primitives import varying
from jax_ub._src.primitives.all_gather_matmul import all_gather_matmul
from jax_ub._src.primitives.all_reduce import all_reduce
from jax_ub._src.primitives.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.fused_group import like
from jax_ub._src.rules.vjp import promote

OP = "UserbuffersForwardLinear"


@dataclasses.dataclass(frozen=True, init=False)
class UserbuffersForwardLinear(userbuffers.UserbuffersLinear):
    """Computes a linear whose GEMM overlaps with its all-gather or reduce-scatter.

    Covers the patterns in `userbuffers_linear`. Compared with separate operations it
    saves the buffer of the gathered input, or of the product before the scatter, and
    the pass that adds the bias.

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
        """Computes a linear from arrays, inside `jax.shard_map`; not differentiable.

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
                configured for `ub_comm_name`, else `JAX_UB_METHOD`, else "auto".
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
        shapes.check_array(OP, "weight", weight)
        call_config = userbuffers.open_linear(
            OP,
            tensor_parallel_mode,
            axis_name,
            sequence_parallel,
            ub_comm_name,
            method,
            weight.dtype if dtype is None else dtype,
        )
        _check(call_config, tensor_parallel_mode, input, weight, bias)
        x, w = input.astype(call_config.dtype), weight.astype(call_config.dtype)
        y = overlapped(call_config, tensor_parallel_mode, x, w, bias)
        return y, {"input": x, "weight": w}

    def forward(self, params, x, extra_inputs, saves):
        """Computes the linear, its bias and its collective in one overlapped call.

        Only the linear has residuals.
        """
        y, residuals = run_window(self.basic_ops, params, x)
        num = len(self.basic_ops)
        return y, ((),) * num, (residuals, *({},) * (num - 1))

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear that can overlap, and its bias and reduce-scatter.

        `userbuffers_linear` lists the three patterns of consecutive operations.
        """
        return cls.fuse(ops)


def run_window(
    basic_ops: Sequence[BasicOperation],
    params: Sequence[Params],
    x: jax.Array,
    *,
    added: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, Residuals]:
    """Computes a linear, its bias and its collective in one overlapped call.

    Args:
        basic_ops: the linear and the bias or reduce-scatter that run with it.
        params: the parameters of each operation.
        x: the input of the linear.
        added: a bias that is added once, after the reduce-scatter.
        residual: array with the shape of the result, added once after the
            reduce-scatter.

    Returns:
        The result, and the linear's residuals.
    """
    window = userbuffers.Window.of(basic_ops)
    call_config = window.call_config(OP, compute_dtype(window.linear.dtype, x))
    _, value, kernel, main_grad = window.linear.operands(params[0], x)
    bias = None
    if window.bias is not None:
        bias = params[1]["bias"]
        call_config = call_config.with_dtypes(
            call_config.dtype, window.bias.dtype or call_config.dtype
        )
    _check(call_config, window.mode, value, kernel, bias)
    addends = {"added": added, "residual": residual}
    y = overlapped(call_config, window.mode, value, kernel, bias, **addends)
    residuals = {"x": value, "kernel": kernel, "like": like(x)}
    if main_grad is not None:
        residuals["main_grad"] = main_grad
    return y, residuals


def overlapped(
    call_config: CallConfig,
    mode: str,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    added: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Computes `x @ w + bias`, overlapped with an all-gather or reduce-scatter.

    Runs AG+GEMM for the mode "column" and GEMM+RS for "row".

    For "row", the sum of `bias` over all ranks is added; `added` and `residual` are
    added once.
    """
    axes = call_config.axes(x, w, bias, added, residual)
    if mode == "row" and bias is not None:
        bias = _summed(call_config, bias)
    if added is not None:
        bias = added if bias is None else bias + added
    x, w, bias, residual = promote((x, w, bias, residual), axes)
    if mode == "column":
        biases = None if bias is None else (bias,)
        ys, _ = all_gather_matmul(
            x, (w,), biases, out_dtype=call_config.out_dtype, **call_config.fused
        )
        return ys[0]
    return matmul_reduce_scatter(
        (x,), (w,), bias, residual, out_dtype=call_config.out_dtype, **call_config.fused
    )


def _summed(call_config, bias):
    """Returns the sum of all ranks' biases, which the reduce-scatter would compute."""
    if call_config.is_vma_checked and not varying.axes_of(bias) & frozenset(
        call_config.axis_name
    ):
        return bias * call_config.num_ranks
    return all_reduce(bias, **call_config.alone)


def _check(call_config, mode, x, w, bias):
    userbuffers.check_activation(call_config, "input", x)
    shapes.check_float(call_config.label, weight=w)
    sharded = "out" if mode == "column" else "in"
    shapes.check_kernel(call_config.label, "weight", w)
    shapes.check_contraction(call_config.label, x, w, call_config.num_ranks, sharded)
    if mode == "row":
        shapes.check_divides(call_config.label, x, call_config.num_ranks)
    shapes.check_addends(call_config.label, bias, None, (w.shape[1],))
