"""Every op in plain `jax.lax`, each dot written the fastest way known for XLA:CPU.

The oracle of the tests, the peer in the benchmarks, and what `Method.XLA` runs. Sums
of partial results are made in f32 and rounded once, as the engine does. f64 operands,
which the engine does not take, are summed in f64.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axis = str | tuple[str, ...]


def sum_dtype(dtype) -> np.dtype:
    """Returns the dtype of sums of values of `dtype`: f64 for f64, else f32."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(x: jax.Array, w: jax.Array, *, rhs_transposed: bool = False) -> jax.Array:
    """Multiplies x [..., K] by w [K, N], or by w [N, K] transposed, in f32."""
    contracted = 1 if rhs_transposed else 0
    return _product(x, w, (((x.ndim - 1,), (contracted,)), ((), ())))


def outer(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Sums x^T dy over all rows: x [..., M, K], dy [..., M, N] -> f32 [K, N]."""
    rows = tuple(range(x.ndim - 1))
    return _product(x, dy, ((rows, rows), ((), ())))


def _product(x, w, dimensions):
    """The f32 product, on f32 copies where XLA multiplies those faster.

    XLA:CPU is fast in half precision with AVX512_BF16 only, and up to 1.5 times as fast
    on f32 copies elsewhere. The products are exact in f32 either way.
    """
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
    # Imported here, so that it is runtime/engine.py that finds a missing engine.
    from jax_ub import _cpu

    return "avx512_bf16" in _cpu.isas()


def dots(
    xs: Sequence[jax.Array], ws: Sequence[jax.Array], *, rhs_transposed: bool = False
) -> jax.Array:
    """Sums the products of all pairs, in f32."""
    products = (
        dot(x, w, rhs_transposed=rhs_transposed) for x, w in zip(xs, ws, strict=True)
    )
    return functools.reduce(operator.add, products)


def add(y: jax.Array, *addends: jax.Array | None, out_dtype) -> jax.Array:
    """Adds what is not None to the f32 sum, then rounds once."""
    for addend in addends:
        if addend is not None:
            y = y + with_rank(addend.astype(sum_dtype(y.dtype)), y.ndim)
    return y.astype(out_dtype)


def with_rank(value: jax.Array, rank: int) -> jax.Array:
    """Puts axes in front; `jax_numpy_rank_promotion="raise"` wants ranks alike."""
    return lax.expand_dims(value, range(rank - value.ndim))


def scaled(y: jax.Array, scale: float) -> jax.Array:
    """Multiplies the f32 sum by `scale`."""
    return y if scale == 1 else y * jnp.float32(scale)


def all_gather(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Gathers rows: [..., m, K] -> [..., P*m, K]."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums over the ranks in f32: [..., P*m, K] -> the own rows, [..., m, K]."""
    return lax.psum_scatter(
        x.astype(sum_dtype(x.dtype)),
        axis_name,
        scatter_dimension=x.ndim - 2,
        tiled=True,
    )


def all_reduce(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums over the ranks in f32."""
    return lax.psum(x.astype(sum_dtype(x.dtype)), axis_name)
