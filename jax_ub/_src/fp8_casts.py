"""Computes scales of rows and blocks, and FP8 values with given scales."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ub._src import reference
from jax_ub._src.scaled_array import MXFP8_BLOCK

# Lower bound of a row's amax (largest absolute value) in `row_scales`, as in torchao.
_ROW_EPSILON = 1e-12
# Layout of f32: width of the significand, and bias of the exponent. The largest number
# of both FP8 formats is 1.75 times a power of two; _SIGNIFICAND_OF_MAX is the
# significand of 1.75.
_SIGNIFICAND_BITS, _SIGNIFICAND_OF_MAX, _EXPONENT_BIAS = 23, 0x600000, 127
_EXPONENT_MASK = 0xFF << _SIGNIFICAND_BITS
# `_rounded_by_addition` replaces XLA's conversion to FP8 for arrays of at least this
# many elements. XLA:CPU runs the additions on more threads, which takes longer for
# smaller arrays. Measured by timing casts on 1 to 8 devices of two Zen 5 cores.
_LEAST_ADDITIONS = 1 << 15


def amax_of(x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Returns the largest absolute value of x, in f32; keeps reduced axes with size 1.

    It is infinite if there is a NaN: `jax.lax.pmax` would drop a NaN, and the recipes
    treat both alike.
    """
    # Maximum and minimum take half as long on XLA:CPU as the maximum of |x|.
    largest, smallest = (f(x, axis=axes, keepdims=True) for f in (jnp.max, jnp.min))
    amax = jnp.maximum(largest, -smallest).astype(jnp.float32)
    return jnp.where(jnp.isnan(amax), jnp.inf, amax)


def cast(x: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """Returns x / scales, computed in f32, clipped and rounded once to `dtype`.

    A NaN stays a NaN, and an infinity becomes the largest number.
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        return _saturated(_divided_by_blocks(x, scales), dtype)
    return _saturated(x.astype(jnp.float32) * (1.0 / scales), dtype)


def _saturated(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.clip(x, -largest, largest)
    # Under `jax.export`, a size may be symbolic and not comparable with a number.
    if not isinstance(x.size, int) or x.size < _LEAST_ADDITIONS:
        return x.astype(dtype)
    return lax.platform_dependent(
        x,
        cpu=functools.partial(_rounded_by_addition, dtype=dtype),
        default=lambda x: x.astype(dtype),
    )


def _rounded_by_addition(x, dtype):
    """Returns `x.astype(dtype)`, three times as fast as XLA:CPU's conversion.

    If |x| is added to 2^23 times the distance of the FP8 numbers around it, the f32 sum
    is rounded to a multiple of this distance, which its last bits contain.
    """
    info = jnp.finfo(dtype)
    shift = _SIGNIFICAND_BITS - info.nmant
    least_exponent = (_EXPONENT_BIAS + info.minexp) << _SIGNIFICAND_BITS
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # The exponent bits of |x|, but at least those of the smallest normal FP8 number.
    exponent = jnp.maximum(bits & _EXPONENT_MASK, least_exponent)
    addend = exponent + (shift << _SIGNIFICAND_BITS)
    sums = jnp.abs(x) + lax.bitcast_convert_type(addend, jnp.float32)
    multiple = lax.bitcast_convert_type(sums, jnp.int32) - addend
    magnitude = ((exponent - least_exponent) >> shift) + multiple
    nan = int(np.array(np.nan, dtype).view(np.uint8))
    magnitude = jnp.where(jnp.isnan(x), nan, magnitude)
    sign = lax.shift_right_logical(bits, 24) & 0x80
    values = (magnitude | sign).astype(jnp.uint8)
    return lax.bitcast_convert_type(values, dtype)


def _divided_by_blocks(x, scales):
    bits = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    exponents = reference.expanded(_EXPONENT_BIAS - bits, x.shape)
    return reference.times_power_of_two(x.astype(jnp.float32), exponents)


def row_scales(amax: jax.Array, dtype) -> jax.Array:
    """Returns the smallest f32 powers of two with amax / scale <= finfo(dtype).max.

    An amax below `_ROW_EPSILON` counts as `_ROW_EPSILON`. The scale of an infinite or
    NaN amax is 1.
    """
    exponents = _exponents_above(jnp.maximum(amax, _ROW_EPSILON), dtype)
    scales = reference.times_power_of_two(jnp.ones_like(amax), exponents)
    return jnp.where(jnp.isfinite(amax), scales, 1.0)


def block_scales(x: jax.Array, axis: int, dtype, margin: int = 0) -> jax.Array:
    """Returns one scale per block of 32 values along `axis`, as float8_e8m0fnu.

    An amax of zero gives 2^-127, an infinite one 2^127, and NaN gives NaN.
    """
    axis %= x.ndim
    num_blocks = x.shape[axis] // MXFP8_BLOCK
    blocks = x.reshape(*x.shape[:axis], num_blocks, MXFP8_BLOCK, *x.shape[axis + 1 :])
    amax = jnp.max(jnp.abs(blocks), axis=axis + 1).astype(jnp.float32)
    exponents = _exponents_above(amax, dtype) + margin
    bits = jnp.clip(exponents + _EXPONENT_BIAS, 0, 254)
    # Sets the exponents of infinity and zero. Otherwise they would be those of the
    # largest and the smallest finite number.
    bits = jnp.where(jnp.isinf(amax), 254, jnp.where(amax == 0, 0, bits))
    bits = jnp.where(jnp.isnan(amax), 255, bits).astype(jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)


def _exponents_above(amax, dtype):
    """Returns the smallest e with amax <= 2^e * m; m is the largest number of `dtype`.

    A logarithm would be wrong next to powers of two.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    significand = bits & ((1 << _SIGNIFICAND_BITS) - 1)
    exponent = (bits >> _SIGNIFICAND_BITS) - _EXPONENT_BIAS
    of_max = math.frexp(jnp.finfo(dtype).max)[1] - 1
    is_above = (significand > _SIGNIFICAND_OF_MAX).astype(jnp.int32)
    return exponent - of_max + is_above


def changes_along(scales: Any, shape: Sequence[int], axis: int) -> bool:
    """Returns whether the scale of an FP8 value depends on its index along `axis`.

    Blocks along the axis do not count.
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        return scales.shape[axis] == shape[axis]
    return scales.shape[axis] != 1


def converted(
    values: jax.Array, scales: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Rescales FP8 values so that their scales do not change along `axis`.

    Args:
        values: the FP8 values.
        scales: one for each row or column, f32, or each block of 32 values along
            another axis, float8_e8m0fnu. They are powers of two.
        axis: the axis that a GEMM contracts.

    Returns:
        Values and scales of the same numbers. The scales are constant along `axis`, or
        belong to blocks along it. Only values that become subnormal are rounded.
    """
    x = reference.dequantize(values, scales)
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = block_scales(x, axis, values.dtype)
    else:
        scales = row_scales(amax_of(x, (axis,)), values.dtype)
    return cast(x, scales, values.dtype), scales
