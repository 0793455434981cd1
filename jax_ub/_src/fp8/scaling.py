"""Computes amax values, scales and FP8 values by the formulas of the recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import reference
from jax_ub._src.errors import ConfigurationError, shown
from jax_ub._src.scaled_array import MXFP8_BLOCK

if TYPE_CHECKING:
    from jax_ub._src.fp8.recipes import (
        DelayedScaling,
        Float8CurrentScaling,
        MXFP8BlockScaling,
    )

# The largest inverse of a scale. Its own inverse, 2^-126, is still a normal f32 number;
# XLA:CPU replaces subnormal numbers by zero.
_LARGEST_INVERSE = 2.0**126
# The smallest amax of a row, as in torchao.
_ROW_EPSILON = 1e-12
# The bits of an f32 number: width of the significand, significand of 1.75, and bias of
# the exponent. The largest number of both FP8 formats is 1.75 times a power of two.
_SIGNIFICAND_BITS, _SIGNIFICAND_OF_MAX, _EXPONENT_BIAS = 23, 0x600000, 127


def amax_of(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Returns the largest absolute value of x in f32; reduced axes have size 1.

    It is infinite if there is a NaN: `jax.lax.pmax` would drop a NaN, and the recipes
    treat both alike.
    """
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    return jnp.where(jnp.isnan(amax), jnp.inf, amax)


def cast(x: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """Divides x by its scales in f32, clips it to the range of `dtype`, rounds once.

    A NaN stays a NaN, and an infinity becomes the largest number.
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        return _saturated(_divided_by_blocks(x, scales), dtype)
    return _saturated(x.astype(jnp.float32) * (1.0 / scales), dtype)


def _saturated(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _divided_by_blocks(x, scales):
    bits = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    exponents = reference.expanded(_EXPONENT_BIAS - bits, x.shape)
    return reference.times_power_of_two(x.astype(jnp.float32), exponents)


def current_scale(
    amax: jax.Array, recipe: Float8CurrentScaling, role: str
) -> jax.Array:
    """Returns the f32 scale amax / m, where m is the largest FP8 number.

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


def row_scales(amax: jax.Array, dtype) -> jax.Array:
    """Returns f32 scales: amax / m, rounded up to a power of two.

    m is the largest number of `dtype`. The scale is 1 if the amax is infinite.
    """
    exponents = _exponents_above(jnp.maximum(amax, _ROW_EPSILON), dtype)
    scales = reference.times_power_of_two(jnp.ones_like(amax), exponents)
    return jnp.where(jnp.isfinite(amax), scales, 1.0)


def block_scales(x: jax.Array, axis: int, recipe: MXFP8BlockScaling, dtype):
    """Returns one e8m0 scale per block of 32 values along `axis`.

    An amax of zero gives 2^-127, an infinite one 2^127, and NaN gives NaN.
    """
    axis %= x.ndim
    num_blocks = x.shape[axis] // MXFP8_BLOCK
    blocks = x.reshape(*x.shape[:axis], num_blocks, MXFP8_BLOCK, *x.shape[axis + 1 :])
    amax = jnp.max(jnp.abs(blocks), axis=axis + 1).astype(jnp.float32)
    exponents = _exponents_above(amax, dtype) + recipe.margin
    bits = jnp.clip(exponents + _EXPONENT_BIAS, 0, 254)
    # Without this, infinity would get the exponent of the largest finite number, and
    # zero that of the smallest.
    bits = jnp.where(jnp.isinf(amax), 254, jnp.where(amax == 0, 0, bits))
    bits = jnp.where(jnp.isnan(amax), 255, bits).astype(jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)


def _exponents_above(amax, dtype):
    """Returns the smallest integers e with amax <= m * 2^e, from the bits of amax.

    m is the largest number of `dtype`. A logarithm would be wrong next to powers of
    two.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    significand = bits & ((1 << _SIGNIFICAND_BITS) - 1)
    exponent = (bits >> _SIGNIFICAND_BITS) - _EXPONENT_BIAS
    of_max = math.frexp(jnp.finfo(dtype).max)[1] - 1
    return exponent - of_max + (significand > _SIGNIFICAND_OF_MAX)


def updated_scale(
    history: jax.Array, scale: jax.Array, recipe: DelayedScaling, role: str
) -> jax.Array:
    """Returns the scale for this step, from the amax history of previous steps.

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
    """Converts the result of a function of a recipe to f32."""
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
    """Returns the amax history with this step's amax at index 0, as Flax does."""
    return jnp.roll(history, -1).at[0].set(amax.reshape(()))
