"""`matmul_reduce_scatter` with its derivative, for row-parallel layers.

The layer has sequence parallelism: each rank keeps its rows (tokens) of the result.
"""

import dataclasses

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.methods import Method
from jax_ub._src.parallel import mode_of
from jax_ub._src.primitives.matmul_reduce_scatter import matmul_reduce_scatter as fused
from jax_ub._src.rules import main_grads as accumulators
from jax_ub._src.rules.call_config import CallConfig, make_call_config, plain_for_f64
from jax_ub._src.rules.layer import layer
from jax_ub._src.rules.row_gradients import row_gradients
from jax_ub._src.rules.vjp import promote

OP = "matmul_reduce_scatter"
_MODE = mode_of("row", True)


def matmul_reduce_scatter(  # noqa: PLR0913, pinned
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Multiplies this rank's features and scatters the rows of the sum over the ranks.

    Equivalent to `jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=-2,
    tiled=True) + bias + residual`, summed in f32 and rounded once. The backward pass
    reads the gradient of the result directly from the peers' memory, or gathers it once
    for dgrad and wgrad.

    Transformer Engine: a row-parallel linear with `ub_overlap_rs`.

    Args:
        x: activations, `[..., M, K/P]`: this rank's features.
        w: kernel, `[K/P, N]`: this rank's rows.
        axis_name: the mesh axis, of size P, to reduce over.
        bias: `[N]`, added once.
        residual: `[..., M/P, N]`, added to this rank's rows.
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        out_dtype: dtype of the result; None takes the dtype of `x`.
        main_grad: f32 accumulator of the kernel's gradient, `[K/P, N]`. Its cotangent
            is `main_grad + dw`, written in place if its buffer is free, and the
            cotangent of `w` is zero.
        rhs_transposed: whether the kernel is stored as `[N, K/P]`. It is read in place,
            and its gradient has the same layout; `w.T` would copy it.

    Returns:
        `[..., M/P, N]`: this rank's rows.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such method, `initialize_ub` made no overlap
            of that `ub_name`, or `rhs_transposed` is not a bool.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    call_config = make_call_config(OP, axis_name, ub_name, method, mode=_MODE)
    shapes.check_flag(call_config.label, "rhs_transposed", rhs_transposed)
    return matmul_reduce_scatter_at(
        dataclasses.replace(call_config, rhs_transposed=rhs_transposed),
        x,
        w,
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        main_grad=main_grad,
    )


@plain_for_f64
def matmul_reduce_scatter_at(
    call_config: CallConfig, x, w, *, bias, main_grad, residual=None, out_dtype=None
):
    """Runs `matmul_reduce_scatter` with the ranks and methods in `call_config`."""
    shapes.check_rank(call_config.label, "x", x)
    kernel = call_config.kernel(w)
    shapes.check_operands(call_config.label, x, kernel, takes_f64=call_config.takes_f64)
    shapes.check_contraction(call_config.label, x, kernel, call_config.num_ranks, "in")
    shapes.check_divides(call_config.label, x, call_config.num_ranks)
    result = (*x.shape[:-2], x.shape[-2] // call_config.num_ranks, kernel.shape[1])
    shapes.check_addends(
        call_config.label,
        bias,
        residual,
        result,
        bias_name=call_config.bias_name,
        takes_f64=shapes.is_f64(x),
    )
    shapes.check_main_grad(call_config.label, main_grad, w)
    out_dtype = shapes.check_out_dtype(call_config.label, out_dtype, x.dtype)
    call_config = call_config.with_dtypes(x.dtype, out_dtype)
    axes = call_config.axes(x, w, bias, residual, main_grad)
    main_grad = accumulators.prepare(call_config.label, main_grad, w, axes)
    x, w, bias, residual = promote((x, w, bias, residual), axes)
    return _row(call_config, x, w, bias, residual, main_grad)


def _forward(call_config, x, w, bias, residual):
    options = {
        "rhs_transposed": call_config.rhs_transposed,
        "out_dtype": call_config.out_dtype,
    }
    return fused((x,), (w,), bias, residual, **options, **call_config.fused)


_row = layer(_forward, row_gradients)
