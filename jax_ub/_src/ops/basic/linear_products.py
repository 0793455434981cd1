"""GEMMs of a linear layer, each after or before its collective (no overlap)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ub._src import reference
from jax_ub._src.ops.operation import Params, RequestedGradients, Residuals
from jax_ub._src.primitives import varying
from jax_ub._src.primitives.all_gather import all_gather
from jax_ub._src.primitives.all_reduce import all_reduce
from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.primitives.reduce_scatter import reduce_scatter
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.fused_group import like
from jax_ub._src.rules.layer import accumulation

if TYPE_CHECKING:
    from jax_ub._src.ops.basic.basic_linear import BasicLinear


def forward(
    op: BasicLinear,
    params: Params,
    x: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    scale: float = 1.0,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, Residuals]:
    """Computes `scale * x @ kernel + bias + residual`, with unfused communication.

    A column-parallel layer all-gathers x before the GEMM; a row-parallel layer sums the
    products over the ranks after it.

    Bias and residual are added once, in f32, after any reduction over the ranks.

    Args:
        op: the linear; see its table of shapes.
        params: the parameters of `op`.
        x: the input of `op`.
        bias: `[N]`, for the features of the result on this rank.
        residual: array with the shape of the result. Without a reduction over the
            ranks, the result reuses its buffer if it is not read later.
        scale: factor of the product.
        out_dtype: dtype of y; None takes the dtype of the computation.

    Returns:
        y, and the residuals of `op`.
    """
    call_config, value, kernel, main_grad = op.operands(params, x)
    call_config = call_config.with_dtypes(
        call_config.dtype, call_config.dtype if out_dtype is None else out_dtype
    )
    residuals = {"kernel": kernel, "like": like(x), "x": value}
    if main_grad is not None:
        residuals["main_grad"] = main_grad
    if x.ndim > 1:
        return _forward(
            op, call_config, value, kernel, bias, residual, scale
        ), residuals
    residual = None if residual is None else residual[None]
    y = _forward(op, call_config, value[None], kernel, bias, residual, scale)
    return y[0], residuals


def _forward(op, call_config, x, kernel, bias, residual, scale):
    if op.tensor_parallel_mode == "column" and op.sequence_parallel:
        x = all_gather(x, **call_config.alone)
    if op.tensor_parallel_mode != "row":
        options = {"scale": scale, "out_dtype": call_config.out_dtype}
        return _matmul(call_config, x, kernel, bias, residual, **options)
    partial = _matmul(call_config, x, kernel, scale=scale, out_dtype=jnp.float32)
    adds = bias is not None or residual is not None
    dtype = jnp.float32 if adds else call_config.out_dtype
    if op.sequence_parallel:
        y = reduce_scatter(partial, out_dtype=dtype, **call_config.alone)
    else:
        y = all_reduce(partial, **call_config.alone)
    return reference.add(y, bias, residual, out_dtype=call_config.out_dtype)


def backward(
    op: BasicLinear,
    residuals: Residuals,
    dy: jax.Array,
    needs: RequestedGradients,
    *,
    residual: jax.Array | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array | None, Params]:
    """Computes the gradients of x and of the kernel, with unfused communication.

    Args:
        op: the linear.
        residuals: the residuals that `op.saved(needs)` names.
        dy: gradient of the result.
        needs: the gradients to compute.
        residual: array with the shape of x that is added to dx; the sum has its dtype.
            If dx is not reduced over the ranks, the sum reuses the buffer of `residual`
            if it is not read later.
        scale: factor of both products.

    Returns:
        dx or None; and a dict with the gradient of "kernel" or the new value of
        "main_grad".
    """
    x, kernel = residuals.get("x"), residuals.get("kernel")
    factor = x if kernel is None else kernel
    call_config = (
        op.call_config(factor.dtype) if factor is not None else op.call_config(dy.dtype)
    )
    if residual is not None:
        call_config = call_config.with_dtypes(call_config.dtype, residual.dtype)
    dy = dy.astype(call_config.dtype)
    is_vector = dy.ndim == 1
    if is_vector:
        dy, x = dy[None], None if x is None else x[None]
        residual = None if residual is None else residual[None]
    if op.tensor_parallel_mode == "row":
        dy = _full_gradient(op, call_config, dy)
    dx, d_params = None, {}
    if needs.x:
        dx = _dgrad(op, call_config, dy, kernel, residual, scale, residuals["like"])
        dx = dx[0] if is_vector else dx
    if op.wants_wgrad(needs):
        main_grad = residuals.get("main_grad")
        name = "kernel" if main_grad is None else "main_grad"
        d_params[name] = _wgrad(op, call_config, x, dy, main_grad, scale)
    return dx, d_params


def _full_gradient(op, call_config, dy):
    if op.sequence_parallel:
        return all_gather(dy, **call_config.alone)
    return (
        all_reduce(dy, **call_config.alone)
        if is_partial_cotangent(call_config, dy)
        else dy
    )


def is_partial_cotangent(call_config: CallConfig, dy: jax.Array) -> bool:
    """Returns whether dy must be summed over the ranks to be the whole gradient.

    `dy` is the cotangent of a result that was summed over the ranks.

    With `shard_map(check_vma=True)`, dy is partial if its type varies over the call's
    axis. This happens inside a fused operation if the result is added to a varying
    array.
    With `check_vma=False`, dy is always partial: JAX transposes psum to psum.
    """
    return not call_config.is_vma_checked or bool(
        frozenset(call_config.axis_name) & varying.axes_of(dy)
    )


def _dgrad(op, call_config, dy, kernel, residual, scale, x_like):
    options = {"rhs_transposed": True, "scale": scale}
    if not _reduces_dgrad(op, call_config, x_like):
        options["out_dtype"] = call_config.out_dtype
        return _matmul(call_config, dy, kernel, None, residual, **options)
    partial = _matmul(call_config, dy, kernel, out_dtype=jnp.float32, **options)
    dtype = call_config.out_dtype if residual is None else jnp.float32
    if op.sequence_parallel:
        dx = reduce_scatter(partial, out_dtype=dtype, **call_config.alone)
    else:
        dx = all_reduce(partial, **call_config.alone)
    return reference.add(dx, residual, out_dtype=call_config.out_dtype)


def _reduces_dgrad(op, call_config, x_like):
    if op.tensor_parallel_mode != "column":
        return False
    # Without sequence parallelism, dx is summed over the ranks only if x has a
    # replicated type. Otherwise dx stays partial: by JAX's convention, the ranks'
    # cotangents then add up to the gradient.
    is_replicated = not frozenset(call_config.axis_name) & varying.axes_of(x_like)
    return op.sequence_parallel or (call_config.is_vma_checked and is_replicated)


def _wgrad(op, call_config, x, dy, main_grad, scale):
    if op.tensor_parallel_mode == "column" and op.sequence_parallel:
        x = all_gather(x, **call_config.alone)
    call_config = call_config.with_dw_dtype(op.param_dtype)
    main_grads, dtype = accumulation(call_config, (dy,), main_grad)
    options = {"scale": scale, "out_dtype": dtype}
    return wgrad(x, (dy,), main_grads, **options, **call_config.local)[0]


def _matmul(call_config, x, kernel, bias=None, residual=None, **options):
    return matmul((x,), (kernel,), bias, residual, **options, **call_config.local)
