"""Forward and gradients of linear operations, whose operands may be FP8."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src.fp8 import state as fp8_state
from jax_ub._src.fp8.recipes import INPUT, KERNEL
from jax_ub._src.ops.operation import Params, Residuals
from jax_ub._src.primitives import vma
from jax_ub._src.rules import scaled
from jax_ub._src.rules.backward import column_gradients, row_gradients
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.operands import check_scaled, pcast_operands
from jax_ub._src.rules.vjp import as_factor
from jax_ub._src.scaled_array import is_scaled, map_scaled, source_of, without_source


def state_in(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the FP8 scales and amax histories (`DelayedScaling`) in `arrays`."""
    return {name: arrays[name] for name in sorted(fp8_state.NAMES) if name in arrays}


def quantized(config: CallConfig, residuals: Residuals, params: Params) -> Residuals:
    """Quantizes "x" and "kernel" in `residuals` if the linear has an FP8 recipe.

    With `DelayedScaling`, `params` has the state, and the returned residuals have the
    new state. x may be quantized already; then its state does not change. The kernel
    may be, too; then the new state lacks its entries, which `ub.quantize` updates.
    """
    if config.fp8 is None:
        return residuals
    roles = tuple(
        role
        for role, name in ((INPUT, "x"), (KERNEL, "kernel"))
        if not is_scaled(residuals[name])
    )
    old = state_in(params)
    if KERNEL not in roles:
        for name in fp8_state.names_of(KERNEL):
            old.pop(name, None)
    names = [name for role in roles for name in fp8_state.names_of(role)]
    state = {name: old[name] for name in names if name in old}

    def quantize(state):
        x, (kernel,), _ = scaled.quantized(
            config, residuals["x"], (residuals["kernel"],), state, roles
        )
        return map_scaled(without_source, {"x": x, "kernel": kernel})

    operands, backward = jax.vjp(quantize, state)
    if INPUT not in roles:
        check_scaled(config, operands["x"], operands["kernel"])
    # The vjp of `quantize` returns the new FP8 state as the "gradient" of the old
    # state. It ignores the cotangents of the quantized arrays, so these are zeros.
    zeros = jax.tree.map(
        lambda a: vma.pcast_varying(jnp.zeros_like(a), vma.axes_of(a)), operands
    )
    (new_state,) = backward(zeros)
    return {**residuals, **operands, **old, **new_state}


def gradient_dtype(residuals: Mapping[str, Any], dy: Any) -> np.dtype:
    """Returns the dtype of the gradient GEMMs; for FP8 operands, dy's dtype."""
    operands = (residuals.get("kernel"), residuals.get("x"))
    wide = (a for a in operands if a is not None and not is_scaled(a))
    return next(wide, source_of(dy)).dtype


def gradients(
    config: CallConfig, dy: Any, residuals: Mapping[str, Any], residual: Any
) -> tuple[jax.Array | None, jax.Array | None, Residuals]:
    """Computes `dy @ w.T + residual`, `x.T @ dy + main_grad` and the new FP8 state.

    `residuals` are those of `BasicLinear`. The first result is None without "kernel",
    the second without "x". With `DelayedScaling`, they have the state with which dy is
    quantized.
    """
    if not jax.tree.leaves(residuals):
        return None, None, {}
    x, kernel, main_grad = map(residuals.get, ("x", "kernel", "main_grad"))
    if config.overlap:
        axes = config.axes(dy, x, kernel, main_grad, residual)
        dy, x, kernel, residual = pcast_operands((dy, x, kernel, residual), axes)
    saved: dict[str, Any] = {
        "x": None if x is None else as_factor(x, config.dtype),
        "gathered": None,
        "ws": None if kernel is None else (as_factor(kernel, config.dtype),),
        "main_grads": None if main_grad is None else (main_grad,),
        "state": state_in(residuals),
    }
    if config.fp8 is None:
        compute = column_gradients if config.mode.gathers_x else row_gradients
        dx, dws = compute(config, saved, {0: dy}, residual=residual)
        return dx, dws.get(0), {}
    dw_dtype = None if main_grad is not None else config.dw_dtype or config.dtype
    dx_dtype = config.dtype if residual is None else residual.dtype
    config = dataclasses.replace(config, source_dtypes=(dx_dtype, dw_dtype))
    gradient, dws, new_state = scaled.scaled_gradients(
        config, saved, {0: dy}, residual=residual
    )
    state = {**saved["state"], **(new_state or {})}
    return source_of(gradient), source_of(dws.get(0)), state
