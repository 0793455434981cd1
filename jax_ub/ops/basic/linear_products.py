"""The products of a `BasicLinear`, and what is communicated before or after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ub import reference
from jax_ub.ops.operation import Needs, Params, Residuals
from jax_ub.primitives import varying
from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.all_reduce import all_reduce
from jax_ub.primitives.matmul import matmul
from jax_ub.primitives.reduce_scatter import reduce_scatter
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.fused_group import like
from jax_ub.rules.layer import accumulation
from jax_ub.rules.site import Site

if TYPE_CHECKING:
    from jax_ub.ops.basic.basic_linear import BasicLinear


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
    """Computes `scale * x @ kernel + bias + residual`, each added once, in f32.

    Args:
        op: the linear; see its table of layouts.
        params: its parameters.
        x: its input.
        bias: `[N]`, this rank's features of the result.
        residual: of the result's shape. Where nothing is reduced, the result is written
            into its buffer, if that is free.
        scale: factor of the product.
        out_dtype: dtype of y; None is that of the computation.

    Returns:
        y, and the residuals of `op`.
    """
    site, value, kernel, main_grad = op.operands(params, x)
    site = site.with_dtypes(site.dtype, site.dtype if out_dtype is None else out_dtype)
    residuals = {"kernel": kernel, "like": like(x), "x": value}
    if main_grad is not None:
        residuals["main_grad"] = main_grad
    if x.ndim > 1:
        return _forward(op, site, value, kernel, bias, residual, scale), residuals
    residual = None if residual is None else residual[None]
    y = _forward(op, site, value[None], kernel, bias, residual, scale)
    return y[0], residuals


def _forward(op, site, x, kernel, bias, residual, scale):
    if op.tensor_parallel_mode == "column" and op.sequence_parallel:
        x = all_gather(x, **site.alone)
    if op.tensor_parallel_mode != "row":
        options = {"scale": scale, "out_dtype": site.out_dtype}
        return _matmul(site, x, kernel, bias, residual, **options)
    partial = _matmul(site, x, kernel, scale=scale, out_dtype=jnp.float32)
    adds = bias is not None or residual is not None
    dtype = jnp.float32 if adds else site.out_dtype
    if op.sequence_parallel:
        y = reduce_scatter(partial, out_dtype=dtype, **site.alone)
    else:
        y = all_reduce(partial, **site.alone)
    return reference.add(y, bias, residual, out_dtype=site.out_dtype)


def backward(
    op: BasicLinear,
    residuals: Residuals,
    dy: jax.Array,
    needs: Needs,
    *,
    residual: jax.Array | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array | None, Params]:
    """Computes the gradients of x and of the kernel, as far as they are needed.

    Args:
        op: the linear.
        residuals: what `op.saved(needs)` names.
        dy: gradient of the result.
        needs: what to compute.
        residual: added to the gradient of x, of its shape; the sum has its dtype.
            Where that gradient is not reduced, it is written into its buffer, if that
            is free.
        scale: factor of both products.

    Returns:
        dx or None, and the kernel's gradient, or main_grad's new value, by name.
    """
    x, kernel = residuals.get("x"), residuals.get("kernel")
    factor = x if kernel is None else kernel
    site = op.site(factor.dtype) if factor is not None else op.site(dy.dtype)
    if residual is not None:
        site = site.with_dtypes(site.dtype, residual.dtype)
    dy = dy.astype(site.dtype)
    is_vector = dy.ndim == 1
    if is_vector:
        dy, x = dy[None], None if x is None else x[None]
        residual = None if residual is None else residual[None]
    if op.tensor_parallel_mode == "row":
        dy = _full_gradient(op, site, dy)
    dx, d_params = None, {}
    if needs.x:
        dx = _dgrad(op, site, dy, kernel, residual, scale, residuals["like"])
        dx = dx[0] if is_vector else dx
    if op.wants_wgrad(needs):
        main_grad = residuals.get("main_grad")
        name = "kernel" if main_grad is None else "main_grad"
        d_params[name] = _wgrad(op, site, x, dy, main_grad, scale)
    return dx, d_params


def _full_gradient(op, site, dy):
    if op.sequence_parallel:
        return all_gather(dy, **site.alone)
    return all_reduce(dy, **site.alone) if misses_ranks(site, dy) else dy


def misses_ranks(site: Site, dy: jax.Array) -> bool:
    """Whether the gradient of a sum over the ranks is each rank's own part of it.

    Where `shard_map` types values, that shows: inside a fused window, what follows may
    be added to something that varies. Elsewhere JAX's convention has it so.
    """
    return not site.is_tracked or bool(frozenset(site.axis_name) & varying.axes_of(dy))


def _dgrad(op, site, dy, kernel, residual, scale, x_like):
    options = {"rhs_transposed": True, "scale": scale}
    if not _reduces_dgrad(op, site, x_like):
        options["out_dtype"] = site.out_dtype
        return _matmul(site, dy, kernel, None, residual, **options)
    partial = _matmul(site, dy, kernel, out_dtype=jnp.float32, **options)
    dtype = site.out_dtype if residual is None else jnp.float32
    if op.sequence_parallel:
        dx = reduce_scatter(partial, out_dtype=dtype, **site.alone)
    else:
        dx = all_reduce(partial, **site.alone)
    return reference.add(dx, residual, out_dtype=site.out_dtype)


def _reduces_dgrad(op, site, x_like):
    if op.tensor_parallel_mode != "column":
        return False
    # Without sequence parallelism, an x that is typed as replicated has the sum of the
    # ranks' parts as its gradient. Elsewhere the ranks' gradients add up to it, as
    # JAX's convention has it.
    is_replicated = not frozenset(site.axis_name) & varying.axes_of(x_like)
    return op.sequence_parallel or (site.is_tracked and is_replicated)


def _wgrad(op, site, x, dy, main_grad, scale):
    if op.tensor_parallel_mode == "column" and op.sequence_parallel:
        x = all_gather(x, **site.alone)
    site = site.with_dw_dtype(op.param_dtype)
    main_grads, dtype = accumulation(site, (dy,), main_grad)
    options = {"scale": scale, "out_dtype": dtype}
    return wgrad(x, (dy,), main_grads, **options, **site.local)[0]


def _matmul(site, x, kernel, bias=None, residual=None, **options):
    return matmul((x,), (kernel,), bias, residual, **options, **site.local)
