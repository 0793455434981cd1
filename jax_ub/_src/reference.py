"""Plain `jax.lax` implementations of GEMMs and collectives, with sums in f32.

`Method.XLA` runs them, the tests use them as oracle and the benchmarks as baseline.
Each dot is written in the fastest form known for XLA:CPU. Partial results are summed in
f32 and rounded once, as in the engine. f64 operands, which the engine does not support,
are summed in f64.

FP8 operands have scales that multiply, which are f32, or powers of two in e8m0. The
scales have the rank of the values, and each size divides the size of the values; or
they are a scalar. FP8 values are exact in bf16. A scale multiplies the f32 sum, unless
it changes along the contracted dimensions: then it multiplies the values first.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axis = str | tuple[str, ...]
# A type: the scales of both operands of a GEMM; None for an operand that is not FP8.
Scales = tuple[jax.Array | None, jax.Array | None]
_NO_SCALES: Scales = (None, None)


def sum_dtype(dtype) -> np.dtype:
    """Returns the dtype in which values of `dtype` are summed: f32, or f64 for f64."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(
    x: jax.Array,
    w: jax.Array,
    *,
    rhs_transposed: bool = False,
    scales: Scales = _NO_SCALES,
) -> jax.Array:
    """Multiplies x [..., K] by w [K, N], or by the transpose of w [N, K], in f32."""
    contracted = 1 if rhs_transposed else 0
    x, x_factor = _widened(x, scales[0], (x.ndim - 1,))
    w, w_factor = _widened(w, scales[1], (contracted,))
    y = _product(x, w, (((x.ndim - 1,), (contracted,)), ((), ())))
    if rhs_transposed and w_factor is not None and w_factor.ndim:
        w_factor = w_factor.T
    return _rescaled(y, x_factor, w_factor)


def outer(x: jax.Array, dy: jax.Array, *, scales: Scales = _NO_SCALES) -> jax.Array:
    """Computes x^T dy over all rows: x [..., M, K], dy [..., M, N] -> f32 [K, N]."""
    rows = tuple(range(x.ndim - 1))
    x, x_factor = _widened(x, scales[0], rows)
    dy, dy_factor = _widened(dy, scales[1], rows)
    y = _product(x, dy, ((rows, rows), ((), ())))
    # The scales are constant along the contracted rows.
    x_factor = None if x_factor is None else x_factor.reshape(-1, 1)
    return _rescaled(
        y, x_factor, None if dy_factor is None else dy_factor.reshape(1, -1)
    )


def _rescaled(y, x_factor, w_factor):
    """Multiplies the sums of a GEMM by the scales of both operands."""
    factors = [
        with_rank(factor, y.ndim)
        for factor in (x_factor, w_factor)
        if factor is not None
    ]
    return y * functools.reduce(operator.mul, factors) if factors else y


def _widened(values, scales, contracted):
    """Converts a GEMM operand from FP8 to bf16, or to f32 if f32 scales multiply it.

    Args:
        values: the operand; returned as it is unless it is FP8.
        scales: its scales, or None.
        contracted: the dimensions that the GEMM sums over.

    Returns:
        The operand, and the scales that multiply the sum, or None.
    """
    if scales is None:
        return values, None
    if scales.dtype == jnp.float8_e8m0fnu:
        return dequantize(values, scales).astype(jnp.bfloat16), None
    if any(scales.shape[axis] > 1 for axis in contracted if scales.ndim):
        return dequantize(values, scales), None
    return values.astype(jnp.bfloat16), scales


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Multiplies FP8 values by their scales; returns f32 of the same shape."""
    wide = values.astype(jnp.float32)
    if scales.dtype != jnp.float8_e8m0fnu:
        return wide * expanded(scales, values.shape)
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    exponents = expanded(bits.astype(jnp.int32), values.shape) - _E8M0_BIAS
    product = times_power_of_two(wide, exponents)
    return jnp.where(exponents == _E8M0_NAN - _E8M0_BIAS, jnp.nan, product)


_E8M0_BIAS, _E8M0_NAN = 127, 255


def times_power_of_two(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """Multiplies f32 values by 2^exponents, exactly for exponents -252 to 254.

    There are two factors, because XLA:CPU replaces subnormal values, such as 2^-127,
    by zero.
    """
    first = exponents >> 1
    return x * _power_of_two(first) * _power_of_two(exponents - first)


def _power_of_two(exponents):
    bits = (exponents + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def expanded(scales, shape):
    """Repeats each scale for all values of its block; returns shape `shape`."""
    scales = with_rank(scales, len(shape))
    for axis, size in enumerate(shape):
        block = size // scales.shape[axis]
        if block > 1 and scales.shape[axis] > 1:
            repeated = jnp.broadcast_to(
                jnp.expand_dims(scales, axis + 1),
                (*scales.shape[: axis + 1], block, *scales.shape[axis + 1 :]),
            )
            sizes = (*scales.shape[:axis], size, *scales.shape[axis + 1 :])
            scales = repeated.reshape(sizes)
    return scales


def _product(x, w, dimensions):
    """Multiplies x and w with an f32 result; on CPUs, f16 and bf16 become f32 first.

    XLA:CPU multiplies f32 copies up to 1.5 times as fast as half precision, except
    bf16 on CPUs with AVX512_BF16. Products of half-precision values are exact in f32
    either way.
    """
    if x.dtype != w.dtype:  # FP8 operands of which one was multiplied by f32 scales
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=dimensions,
        preferred_element_type=sum_dtype(x.dtype),
    )
    if x.dtype == sum_dtype(x.dtype) or (
        x.dtype == jnp.bfloat16 and _has_bf16_products()
    ):
        return multiply(x, w)

    def widen_and_multiply(x, w):
        return multiply(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w, cpu=widen_and_multiply, default=multiply)


@functools.cache
def _has_bf16_products():
    # The engine is imported here, so that runtime/cpu_engine.py can report a missing
    # one.
    from jax_ub import _cpu

    return "avx512_bf16" in _cpu.isas()


def dots(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    *,
    rhs_transposed: bool = False,
    x_scales: Sequence[jax.Array] | None = None,
    w_scales: Sequence[jax.Array] | None = None,
) -> jax.Array:
    """Returns `sum_i x_i @ w_i` in f32, or `x_i @ w_i.T` if `rhs_transposed`."""
    none = [None] * len(xs)
    pairs = zip(xs, ws, x_scales or none, w_scales or none, strict=True)
    products = (
        dot(x, w, rhs_transposed=rhs_transposed, scales=(x_scale, w_scale))
        for x, w, x_scale, w_scale in pairs
    )
    return functools.reduce(operator.add, products)


def add(y: jax.Array, *addends: jax.Array | None, out_dtype) -> jax.Array:
    """Adds bias, residual and other addends to f32 sums y, and rounds once."""
    for addend in addends:
        if addend is not None:
            y = y + with_rank(addend.astype(sum_dtype(y.dtype)), y.ndim)
    return y.astype(out_dtype)


def with_rank(value: jax.Array, rank: int) -> jax.Array:
    """Prepends axes of size 1 until `value` has `rank` dimensions.

    Broadcasting would fail with `jax_numpy_rank_promotion="raise"`.
    """
    return lax.expand_dims(value, range(rank - value.ndim))


def scaled(y: jax.Array, scale: float) -> jax.Array:
    """Multiplies an f32 array by `scale`; returns it unchanged if `scale` is 1."""
    return y if scale == 1 else y * jnp.float32(scale)


def all_gather(x: jax.Array, axis_name: Axis) -> jax.Array:
    """All-gathers the rows of x over the ranks: [..., m, K] -> [..., P*m, K].

    FP8 arrays travel as bytes: XLA:CPU would convert them to f16.
    """
    is_fp8 = x.dtype.itemsize == 1
    rows = lax.bitcast_convert_type(x, jnp.uint8) if is_fp8 else x
    gathered = lax.all_gather(rows, axis_name, axis=x.ndim - 2, tiled=True)
    return lax.bitcast_convert_type(gathered, x.dtype) if is_fp8 else gathered


def all_gather_scales(x: jax.Array, scales: jax.Array, axis_name: Axis) -> jax.Array:
    """All-gathers the scales of x over the ranks, if x's rows have own scales.

    One scale for a whole tensor must be the same on every rank, and stays as it is.
    """
    has_rows = bool(scales.ndim) and scales.shape[-2] == x.shape[-2]
    return all_gather(scales, axis_name) if has_rows else scales


def reduce_scatter(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums x [..., P*m, K] over ranks in f32; returns this rank's rows [..., m, K]."""
    return lax.psum_scatter(
        x.astype(sum_dtype(x.dtype)),
        axis_name,
        scatter_dimension=x.ndim - 2,
        tiled=True,
    )


def all_reduce(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums x, of any shape, over the ranks, with f32 accumulation."""
    return lax.psum(x.astype(sum_dtype(x.dtype)), axis_name)
