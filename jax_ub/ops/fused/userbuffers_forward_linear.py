"""A linear whose GEMM overlaps with its gather or its scatter, forward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_ub import shapes
from jax_ub.methods import Method
from jax_ub.ops.fused import userbuffers_linear as userbuffers
from jax_ub.ops.operation import (
    BasicOperation,
    Op,
    Params,
    Residuals,
    compute_dtype,
)
from jax_ub.primitives import varying
from jax_ub.primitives.all_gather_matmul import all_gather_matmul
from jax_ub.primitives.all_reduce import all_reduce
from jax_ub.primitives.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub.rules.call_config import CallConfig
from jax_ub.rules.fused_group import like
from jax_ub.rules.vjp import promote

OP = "UserbuffersForwardLinear"


@dataclasses.dataclass(frozen=True, init=False)
class UserbuffersForwardLinear(userbuffers.UserbuffersLinear):
    """`BasicLinear`, `Bias`, `ReduceScatter` in one call (see `userbuffers_linear`).

    Transformer Engine: `UserbuffersForwardLinear`. Saves the gathered input, or the
    product before it is scattered, and the pass that adds the bias.
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
        """Computes the forward, inside `jax.shard_map`; not differentiable by itself.

        | mode | input | weight | bias | result |
        |---|---|---|---|---|
        | "column" | `[..., M/P, K]` | `[K, N/P]` | `[N/P]` | `[..., M, N/P]` |
        | "row" | `[..., M, K/P]` | `[K/P, N]` | `[N]` | `[..., M/P, N]` |

        Args:
            input: activations.
            weight: kernel, `[in, out]`.
            bias: in "row" every rank has one of its own, and their sum is added, as if
                each were added to its rank's product before the scatter.
            tensor_parallel_mode: "column" or "row".
            axis_name: the mesh axis of the P ranks.
            sequence_parallel: must be True: rows are what is gathered and scattered.
            ub_comm_name: name of the communicator's configuration, in errors too.
            method: how it runs; None is what the name, `JAX_UB_METHOD` or "auto" says.
            dtype: what it computes in and returns; None is that of `weight`.

        Returns:
            The result, and what `UserbuffersBackwardLinear.functional_backward` takes:
            {"input": ..., "weight": ...} in the dtype of the computation.

        Raises:
            ShapeContractError: if the operands do not fit each other or the mesh.
            UnknownNameError: if there is no such mode or method.
            UnsupportedOverlapError: without sequence parallelism, or if the method that
                was named cannot run here.
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
        """One call; residuals are those of the `BasicLinear`."""
        y, residuals = run_window(self.basic_ops, params, x)
        num = len(self.basic_ops)
        return y, ((),) * num, (residuals, *({},) * (num - 1))

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces every window that is one of the three patterns."""
        return cls.fuse(ops)


def run_window(
    basic_ops: Sequence[BasicOperation],
    params: Sequence[Params],
    x: jax.Array,
    *,
    added: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, Residuals]:
    """Runs the forward of a window.

    Args:
        basic_ops: the window.
        params: those of its operations.
        x: its input.
        added: a bias that is added once, after a scatter.
        residual: likewise, of the result's shape.

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
    """AG+GEMM, or GEMM+RS with the biases of all ranks and what is added once."""
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
    """The sum of all ranks' biases, which is what a scatter makes of them."""
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
