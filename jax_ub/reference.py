"""Every op in plain `jax.lax`, each dot written the fastest way known for XLA:CPU.

The oracle of the tests, the peer in the benchmarks, and what `Method.XLA` runs. Sums
of partial results are made in f32 and rounded once, as the engine does.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Axis = str | tuple[str, ...]


def dot(x: jax.Array, w: jax.Array, *, rhs_transposed: bool = False) -> jax.Array:
    """Multiplies x [..., K] by w [K, N], or by w [N, K] transposed, in f32."""
    contracted = 1 if rhs_transposed else 0
    return lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (contracted,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def outer(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Sums x^T dy over all rows: x [..., M, K], dy [..., M, N] -> f32 [K, N]."""
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(
        x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )


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
            y = y + addend.astype(jnp.float32)
    return y.astype(out_dtype)


def all_gather(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Gathers rows: [..., m, K] -> [..., P*m, K]."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums over the ranks in f32: [..., P*m, K] -> the own rows, [..., m, K]."""
    return lax.psum_scatter(
        x.astype(jnp.float32), axis_name, scatter_dimension=x.ndim - 2, tiled=True
    )


def all_reduce(x: jax.Array, axis_name: Axis) -> jax.Array:
    """Sums over the ranks in f32."""
    return lax.psum(x.astype(jnp.float32), axis_name)
