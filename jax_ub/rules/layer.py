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
from jax_ub.rules.call_config import CallConfig
from jax_ub.rules.main_grads import check_vmapped_together
from jax_ub.rules.vjp import (
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
    """Returns a differentiable (call_config, x, w, bias, residual, main_grad) -> y.

    Args:
        forward: (call_config, x, w, bias, residual) -> y.
        gemms: (call_config, x, w, dy, main_grad) -> (dx, dw), where `w` is None if dx
            is not wanted, and `x` is None if dw is not; with a `main_grad`, dw is added
            to it.
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
            # Only its dtype is needed: an empty array keeps that and no memory.
            "residual": residual_or_placeholder(needs(residual), _emptied(values[3])),
            "main_grad": residual_or_placeholder(needs(main_grad), values[4]),
        }
        return save(call(call_config, *values), "y", call_config.ub_name), residuals

    def call_bwd(call_config, residuals, dy):
        residuals = present_residuals(residuals)
        main_grad, residual = residuals["main_grad"], residuals["residual"]
        if is_zero(dy):
            # A main_grad's cotangent is its new value: here nothing is added.
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
    """Refuses an accumulator on an axis of `jax.vmap`.

    A backward rule may run after the `vmap`, where its axis is unbound. So JAX
    differentiates such calls itself, which accumulates nothing.
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
    """The accumulators of a wgrad of `dys`, or None, and the dtype of its results."""
    if main_grads[0] is None:
        return None, call_config.dw_dtype or call_config.dtype
    pairs = zip(main_grads, dys, strict=True)
    return tuple(
        check_vmapped_together(call_config.label, *pair) for pair in pairs
    ), jnp.float32
