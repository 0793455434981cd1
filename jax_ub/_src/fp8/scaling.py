"""Computes scales per tensor by the formulas of the recipes."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src.errors import ConfigurationError, shown
from jax_ub._src.fp8.recipes import DelayedScaling, Float8CurrentScaling

# The largest inverse of a scale. The scale is then 2^-126, the smallest normal f32
# number. XLA:CPU replaces smaller ones by zero.
_LARGEST_INVERSE = 2.0**126
_SIGNIFICAND_BITS = 23  # of an f32 number


def current_scale(
    amax: jax.Array, recipe: Float8CurrentScaling, role: str
) -> jax.Array:
    """Returns the scale amax / m in f32, where m is the largest FP8 number.

    It is 1 if the amax is 0, infinite or NaN.
    """
    largest = jnp.finfo(recipe.fp8_format.dtype(role)).max.astype(jnp.float32)
    amax = jnp.maximum(amax, recipe.amax_epsilon(role))
    inverse = jnp.minimum(largest / amax, _LARGEST_INVERSE)
    if recipe.has_power_2_scale(role):
        inverse = _rounded_down_to_power_of_two(inverse)
    return jnp.where((amax > 0) & jnp.isfinite(amax), 1 / inverse, 1.0)


def _rounded_down_to_power_of_two(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mask = -1 << _SIGNIFICAND_BITS
    return lax.bitcast_convert_type(bits & mask, jnp.float32)


def updated_scale(
    history: jax.Array, scale: jax.Array, recipe: DelayedScaling, role: str
) -> jax.Array:
    """Returns the scale for this step, computed from the amax history.

    Args:
        history: f32 `[amax_history_len]`; index 0 is the latest step.
        scale: f32 `[1]`, the scale of the previous step.
        recipe: the recipe.
        role: "input", "kernel" or "output_grad".
    """
    largest = jnp.finfo(recipe.fp8_format.dtype(role)).max.astype(jnp.float32)
    algo = recipe.amax_compute_algo
    if callable(algo):
        amax = _one_number("amax_compute_algo", algo(history))
    else:
        amax = history[0] if algo == "most_recent" else jnp.max(history)
    amax = amax.reshape(scale.shape)
    old = 1 / scale
    if recipe.scaling_factor_compute_algo is None:
        inverse = largest / amax / jnp.float32(2.0**recipe.margin)
    else:
        inverse = recipe.scaling_factor_compute_algo(amax, old, largest, recipe)
        inverse = _one_number("scaling_factor_compute_algo", inverse)
        inverse = inverse.reshape(scale.shape)
    inverse = jnp.clip(inverse, 1 / _LARGEST_INVERSE, _LARGEST_INVERSE)
    return jnp.where((amax > 0) & jnp.isfinite(amax), 1 / inverse, scale)


def _one_number(name, returned):
    """Converts the result of a recipe's user-defined function to an f32 number."""
    try:
        array = jnp.asarray(returned, jnp.float32)
    except (TypeError, ValueError):
        array = None
    if array is None or array.size != 1:
        found = shown(returned) if array is None else f"an array of shape {array.shape}"
        raise ConfigurationError(
            f"DelayedScaling: {name} returned {found} instead of one number. Return an "
            "f32 scalar."
        )
    return array


def updated_history(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns the history with this step's amax at index 0, shifted as in Flax."""
    return jnp.roll(history, -1).at[0].set(amax.reshape(()))
