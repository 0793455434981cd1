"""The derivative that all layers with one kernel share.

y = forward(x, w) + bias + residual. A rule says how its two GEMMs backward run; what is
saved for them, what is left out because nobody asked for it, and the gradients of the
addends are the same for all.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ub.errors import UnsupportedOverlapError
from jax_ub.rules.bias import bias_gradient
from jax_ub.rules.main_grads import mapped_alike
from jax_ub.rules.site import Site
from jax_ub.rules.vjp import (
    compiled,
    is_zero,
    keep_if,
    kept,
    needs,
    needs_dw,
    save,
    value_of,
)


def layer(forward: Callable, gemms: Callable) -> Callable:
    """Makes the differentiable function of (site, x, w, bias, residual, main_grad).

    Args:
        forward: (site, x, w, bias, residual) -> y.
        gemms: (site, x, w, dy, main_grad) -> (dx, dw), where `w` is None if dx is not
            wanted, and `x` is None if dw is not; with a `main_grad`, dw is added to it.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(site, x, w, bias, residual, main_grad):
        return forward(site, x, w, bias, residual)

    def call_fwd(site, x, w, bias, residual, main_grad):
        values = value_of((x, w, bias, residual, main_grad))
        residuals = {
            "x": keep_if(needs_dw(w, main_grad), save(values[0], "x", site.ub_name)),
            "w": keep_if(needs(x), values[1]),
            "bias": keep_if(needs(bias), values[2]),
            # Only its dtype is needed: an empty array keeps that and no memory.
            "residual": keep_if(needs(residual), _emptied(values[3])),
            "main_grad": keep_if(needs(main_grad), values[4]),
        }
        return save(call(site, *values), "y", site.ub_name), residuals

    def call_bwd(site, residuals, dy):
        residuals = kept(residuals)
        main_grad, residual = residuals["main_grad"], residuals["residual"]
        if is_zero(dy):
            # A main_grad's cotangent is its new value: here nothing is added.
            return None, None, None, None, main_grad
        dx, dw = gemms(site, residuals["x"], residuals["w"], dy, main_grad)
        db = bias_gradient(residuals["bias"], dy)
        d_residual = None if residual is None else dy.astype(residual.dtype)
        if main_grad is None:
            return dx, dw, db, d_residual, None
        return dx, None, db, d_residual, dw

    call.defvjp(call_fwd, call_bwd, symbolic_zeros=True)
    with_rule = compiled(call, static_argnums=0)

    def product(site, x, w, bias, residual, main_grad):
        if not site.is_mapped:
            return with_rule(site, x, w, bias, residual, main_grad)
        check_no_main_grad(site, main_grad)
        return forward(site, x, w, bias, residual)

    return product


def check_no_main_grad(site: Site, main_grad) -> None:
    """Refuses an accumulator on an axis of `jax.vmap`.

    A backward rule may run after the `vmap`, where its axis is unbound. So JAX
    differentiates such calls itself, which accumulates nothing.
    """
    if main_grad is not None:
        raise UnsupportedOverlapError(
            f"{site.label}: main_grad over {site.axis_name}, an axis of jax.vmap. Use "
            "jax.shard_map, or leave out main_grad."
        )


def _emptied(array):
    return None if array is None else array.reshape(-1)[:0]


def accumulation(site, dys, *main_grads):
    """The accumulators of a wgrad of `dys`, or None, and the dtype of its results."""
    if main_grads[0] is None:
        return None, site.dw_dtype or site.dtype
    pairs = zip(main_grads, dys, strict=True)
    return tuple(mapped_alike(site.label, *pair) for pair in pairs), jnp.float32
