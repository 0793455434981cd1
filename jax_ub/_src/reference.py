"""Plain `jax.lax` implementations of GEMMs and collectives, with sums in f32.

`Method.XLA` runs them, the tests use them as oracle and the benchmarks as baseline.
Each dot is written in the fastest form known for XLA:CPU. Partial results are summed in
f32 and rounded once, as in the engine. f64 operands, which the engine does not support,
are summed in f64. The scales of FP8 operands multiply the sums if they are constant
along the contracted dimension. The others are powers of two and multiply the elements,
which then become bf16; that is exact.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_ub._src import dtypes

Axis = str | tuple[str, ...]
_EXPONENT_BIAS = 127  # of f32 and of e8m0
_E8M0_NAN = 255


def sum_dtype(dtype) -> np.dtype:
    """Returns the dtype in which `dtype` is summed: f64 for f64, and f32 otherwise."""
    return np.promote_types(dtype, np.float32)


def dot(
    x: jax.Array,
    w: jax.Array,
    *,
    rhs_transposed: bool = False,
    scales: Sequence[jax.Array] = (),
) -> jax.Array:
    """Returns x @ w in f32 for x [..., K] and w [K, N], or [N, K] if transposed.

    `scales` has those of x and of w, if they are FP8.
    """
    contracted = 1 if rhs_transposed else 0
    (x, x_factor), (w, w_factor) = _factored((x, w), scales, (x.ndim - 1, contracted))
    y = _product(x, w, (((x.ndim - 1,), (contracted,)), ((), ())))
    if w_factor is not None and w_factor.ndim == 2 and rhs_transposed:
        w_factor = w_factor.T
    return _times(y, x_factor, w_factor)


def outer(x: jax.Array, dy: jax.Array, scales: Sequence[jax.Array] = ()) -> jax.Array:
    """Returns x^T dy in f32, summed over rows: [..., M, K], [..., M, N] -> [K, N]."""
    rows = tuple(range(x.ndim - 1))
    (x, x_factor), (dy, dy_factor) = _factored((x, dy), scales, (None, None))
    # The output sharding is given, because JAX does not choose one if an explicit mesh
    # shards the rows, over which the product is summed.
    of_x, of_dy = jax.typeof(x).sharding, jax.typeof(dy).sharding
    spec = PartitionSpec(of_x.spec[-1], of_dy.spec[-1])
    is_sharded = any(of_x.spec[:-1]) and any(of_dy.spec[:-1])
    out_sharding = of_x.update(spec=spec) if is_sharded else None
    y = _product(x, dy, ((rows, rows), ((), ())), out_sharding)
    return _times(y, x_factor, dy_factor)


def _factored(operands, scales, contracted):
    """Splits each operand into (array, factor), whose product is the operand's value.

    The factor has the f32 scales that do not vary along the contracted axis. Other
    scales multiply the array's elements, and the factor is None. A scale per tensor has
    shape [1]. `contracted` is the contracted axis of each operand, or None if several
    axes are contracted.
    """
    if not scales:
        return [(operand, None) for operand in operands]
    factored = []
    for values, scale, axis in zip(operands, scales, contracted, strict=True):
        is_f32 = scale.dtype == jnp.float32
        if scale.ndim == 1:
            factored.append((values, scale.reshape(())))
        elif is_f32 and axis is not None and scale.shape[axis] == 1:
            factored.append((values, scale))
        else:
            factored.append((dequantize(values, scale, jnp.bfloat16), None))
    return factored


def _times(y, *factors):
    """Multiplies f32 sums by the scales of both operands. A scale of None means 1.

    They are multiplied by the product of the scales, or by one after the other if f32
    cannot represent the product as a normal number.
    """
    if all(factor is None for factor in factors):
        return y
    first, second = (jnp.float32(1) if factor is None else factor for factor in factors)
    first, second = with_rank(first, y.ndim), with_rank(second, y.ndim)
    product = first * second
    size = jnp.abs(product)
    is_normal = (size >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(size)
    y = y * jnp.where(is_normal, product, first)
    return y * jnp.where(is_normal, 1, second)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def dequantize(values: jax.Array, scales: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Returns values * scales, for scales per tensor, row or block.

    The product is computed in f32 and rounded to `dtype`. In f16, 2^16 becomes the
    largest number, 65504, instead of infinity, because FP8 rounds the largest f16
    numbers up to 2^16.
    """
    wide = values.astype(jnp.float32)
    if scales.dtype != jnp.float8_e8m0fnu:
        product = wide * expanded(scales, values.shape)
    else:
        bits = lax.bitcast_convert_type(scales, jnp.uint8)
        bits = expanded(bits.astype(jnp.int32), values.shape)
        product = times_power_of_two(wide, bits - _EXPONENT_BIAS)
        product = jnp.where(bits == _E8M0_NAN, jnp.nan, product)
    if dtype == jnp.float16:
        largest = float(jnp.finfo(dtype).max)
        clipped = jnp.clip(product, -largest, largest)
        product = jnp.where(jnp.abs(product) <= 2.0**16, clipped, product)
    return product.astype(dtype)


def times_power_of_two(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """Returns x * 2^exponents for f32 x, exactly for exponents from -252 to 254.

    There are two factors, because XLA:CPU replaces subnormal values, such as 2^-127,
    by zero.
    """
    first = exponents >> 1
    return x * _power_of_two(first) * _power_of_two(exponents - first)


def _power_of_two(exponents):
    bits = (exponents + _EXPONENT_BIAS) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def expanded(scales, shape):
    """Repeats scales of blocks, so that they can be broadcast to `shape`."""
    scales = with_rank(scales, len(shape))
    for axis, size in enumerate(shape):
        # Only equality of sizes is tested, because symbolic sizes of `jax.export` have
        # no order.
        count = scales.shape[axis]
        if count not in (1, size):
            # `jnp.repeat` cannot repeat along a sharded axis of an explicit mesh, so
            # the scales are broadcast and reshaped.
            before, after = scales.shape[:axis], scales.shape[axis + 1 :]
            blocks = jnp.expand_dims(scales, axis + 1)
            blocks = jnp.broadcast_to(blocks, (*before, count, size // count, *after))
            scales = blocks.reshape(*before, size, *after)
    return scales


def _product(x, w, dimensions, out_sharding=None):
    """Multiplies x and w with an f32 result. CPUs first convert f16 and bf16 to f32.

    XLA:CPU multiplies f32 copies up to 1.5 times as fast as half precision, except
    bf16 on CPUs with AVX512_BF16. Products of half-precision values are exact in f32
    either way. FP8 values become bf16, or the dtype of the other operand, which is
    exact.
    """
    wide = [a.dtype for a in (x, w) if a.dtype not in dtypes.FP8] or [jnp.bfloat16]
    x, w = (a.astype(wide[0]) if a.dtype in dtypes.FP8 else a for a in (x, w))
    summed = sum_dtype(x.dtype)
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=dimensions,
        preferred_element_type=summed,
        out_sharding=out_sharding,
    )
    if x.dtype == summed or (x.dtype == jnp.bfloat16 and _has_bf16_products()):
        return multiply(x, w)

    def widen_and_multiply(x, w):
        return multiply(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w, cpu=widen_and_multiply, default=multiply)


@functools.cache
def _has_bf16_products():
    # The CPU engine is imported here instead of at the top, because
    # runtime/cpu_engine.py must be able to report that it is missing.
    try:
        from jax_ub import _cpu
    except ImportError:
        return False
    return "avx512_bf16" in _cpu.isas()


def dots(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    *,
    rhs_transposed: bool = False,
    scales: Sequence[jax.Array] = (),
) -> jax.Array:
    """Returns the sum over i of `x_i @ w_i`, or `x_i @ w_i.T`, in f32.

    `scales` has those of all x_i, then those of all w_i, if they are FP8.
    """
    n = len(xs)
    products = (
        dot(x, w, rhs_transposed=rhs_transposed, scales=scales[i::n])
        for i, (x, w) in enumerate(zip(xs, ws, strict=True))
    )
    return functools.reduce(operator.add, products)


def add(y: jax.Array, *addends: jax.Array | None, out_dtype) -> jax.Array:
    """Adds bias, residual and other addends to f32 sums y; rounds to `out_dtype`."""
    for addend in addends:
        if addend is not None:
            y = y + with_rank(addend.astype(sum_dtype(y.dtype)), y.ndim)
    return y.astype(out_dtype)


def with_rank(value: jax.Array, rank: int) -> jax.Array:
    """Returns `value` with `rank` dimensions, by prepending dimensions of size 1.

    Broadcasting would fail with `jax_numpy_rank_promotion="raise"`.
    """
    return lax.expand_dims(value, range(rank - value.ndim))


def scaled(y: jax.Array, scale: float) -> jax.Array:
    return y if scale == 1 else y * jnp.float32(scale)


def all_gather(x: jax.Array, axis_name: Axis) -> jax.Array:
    """All-gathers rows over P ranks: [..., m, K] -> [..., P*m, K].

    FP8 arrays and e8m0 scales are sent as bytes; XLA:CPU would convert them to f16.
    """
    is_fp8 = x.dtype in dtypes.FP8 or x.dtype == jnp.float8_e8m0fnu
    rows = lax.bitcast_convert_type(x, jnp.uint8) if is_fp8 else x
    gathered = lax.all_gather(rows, axis_name, axis=x.ndim - 2, tiled=True)
    return lax.bitcast_convert_type(gathered, x.dtype) if is_fp8 else gathered


def reduce_scatter(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums x [..., P*m, K] over P ranks in f32; returns a rank's rows [..., m, K]."""
    wide = x.astype(sum_dtype(x.dtype))
    return lax.psum_scatter(wide, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def all_reduce(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums x over all ranks in f32. x may have any shape."""
    return lax.psum(x.astype(sum_dtype(x.dtype)), axis_name)
