"""Builds the `custom_vjp` that all dense layers with one kernel share.

y = forward(x, w) + bias + residual. Each rule supplies the two GEMMs of its backward
pass. This module saves their residuals, skips gradients that are not needed, and
computes the gradients of bias and residual.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.rules.bias import bias_gradient
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.main_grads import check_vmapped_together
from jax_ub._src.rules.vjp import (
    is_zero,
    jitted_rule,
    needs,
    needs_dw,
    present_residuals,
    residual_or_placeholder,
    save,
    value_of,
)


def layer(forward: Callable, gemms: Callable) -> Callable:
    """Makes a differentiable dense layer from its forward pass and two backward GEMMs.

    Args:
        forward: (call_config, x, w, bias, residual) -> y.
        gemms: (call_config, x, w, dy, main_grad) -> (dx, dw). `w` is None if dx is not
            needed, and `x` is None if dw is not needed. With a `main_grad`, the second
            result is main_grad + dw.

    Returns:
        The function (call_config, x, w, bias, residual, main_grad) -> y.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(call_config, x, w, bias, residual, main_grad):
        return forward(call_config, x, w, bias, residual)

    def call_fwd(call_config, x, w, bias, residual, main_grad):
        values = value_of((x, w, bias, residual, main_grad))
        residuals = {
            "x": residual_or_placeholder(
                needs_dw(w, main_grad), save(values[0], "x", call_config.ub_name)
            ),
            "w": residual_or_placeholder(needs(x), values[1]),
            "bias": residual_or_placeholder(needs(bias), values[2]),
            # The backward pass needs the dtype only, which an empty array carries.
            "residual": residual_or_placeholder(needs(residual), _emptied(values[3])),
            "main_grad": residual_or_placeholder(needs(main_grad), values[4]),
        }
        return save(call(call_config, *values), "y", call_config.ub_name), residuals

    def call_bwd(call_config, residuals, dy):
        residuals = present_residuals(residuals)
        main_grad, residual = residuals["main_grad"], residuals["residual"]
        if is_zero(dy):
            # A main_grad's cotangent is its new value, here the unchanged old one.
            return None, None, None, None, main_grad
        dx, dw = gemms(call_config, residuals["x"], residuals["w"], dy, main_grad)
        db = bias_gradient(residuals["bias"], dy)
        d_residual = None if residual is None else dy.astype(residual.dtype)
        if main_grad is None:
            return dx, dw, db, d_residual, None
        return dx, None, db, d_residual, dw

    call.defvjp(call_fwd, call_bwd, symbolic_zeros=True)
    with_rule = jitted_rule(call, static_argnums=0)

    def product(call_config, x, w, bias, residual, main_grad):
        if not call_config.is_mapped:
            return with_rule(call_config, x, w, bias, residual, main_grad)
        check_no_main_grad(call_config, main_grad)
        return forward(call_config, x, w, bias, residual)

    return product


def check_no_main_grad(call_config: CallConfig, main_grad) -> None:
    """Raises an error for `main_grad` if the ranks are an axis of `jax.vmap`.

    The backward rule of a `custom_vjp` may run outside the `vmap`, where the axis is
    unbound. JAX therefore differentiates such calls itself and cannot accumulate.
    """
    if main_grad is not None:
        raise UnsupportedOverlapError(
            f"{call_config.label}: main_grad over {call_config.axis_name}, an axis of "
            f"jax.vmap. Use "
            "jax.shard_map, or leave out main_grad."
        )


def _emptied(array):
    return None if array is None else array.reshape(-1)[:0]


def accumulation(call_config, dys, *main_grads):
    """Returns the wgrad's accumulators (or None), and the dtype of its results.

    The dtype is f32 with accumulators. `main_grads` has one entry for each dy, all
    None if there are none.
    """
    if main_grads[0] is None:
        return None, call_config.dw_dtype or call_config.dtype
    pairs = zip(main_grads, dys, strict=True)
    return tuple(
        check_vmapped_together(call_config.label, *pair) for pair in pairs
    ), jnp.float32
