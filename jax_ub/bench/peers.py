"""What XLA is compared as: its collectives around its dots, and a ppermute ring.

Every function is per device, inside `jax.shard_map`. A `dot` multiplies two operands
into a third of the dtype that it is asked for, see `dots.Way`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub.bench.devices import AXIS
from jax_ub.bench.dots import Dot, naive


def gather(x: jax.Array) -> jax.Array:
    """XLA's all-gather of rows."""
    return lax.all_gather(x, AXIS, axis=0, tiled=True)


def scatter(x: jax.Array) -> jax.Array:
    """XLA's reduce-scatter of rows."""
    return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


def scatter_and_gather(x: jax.Array) -> jax.Array:
    """An all-reduce out of XLA's other two collectives."""
    return gather(scatter(x))


def all_reduce(x: jax.Array) -> jax.Array:
    """XLA's all-reduce."""
    return lax.psum(x, AXIS)


def sum_dtypes(dtype: str) -> tuple[str, ...]:
    """In which dtypes partial sums may travel: in that of the operands, or in f32."""
    return tuple(dict.fromkeys((dtype, "float32")))


def reduced(
    collective: Callable[[jax.Array], jax.Array], dot: Dot, moved: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`collective(dot)`, moving partial sums of the dtype `moved`."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return collective(dot(x, w, moved)).astype(x.dtype)

    return program


def naive_column(x: jax.Array, w: jax.Array) -> jax.Array:
    """AG+GEMM as people write it."""
    return gather(x) @ w


def naive_row(x: jax.Array, w: jax.Array) -> jax.Array:
    """GEMM+RS as people write it."""
    return scatter(x @ w)


def naive_all_reduce(x: jax.Array, w: jax.Array) -> jax.Array:
    """GEMM+AR as people write it."""
    return all_reduce(x @ w)


def ring_gather_dot(x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """Multiplies one shard while the next travels: the AG+GEMM ring.

    Shards move to the lower rank, so in step s rank r multiplies shard (r + s) mod P:

    | P = 4 | s = 0 | 1 | 2 | 3 |
    |---|---|---|---|---|
    | rank 0 | 0 | 1 | 2 | 3 |
    | rank 3 | 3 | 0 | 1 | 2 |
    """
    num_ranks, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
    rows = x.shape[0]
    product = dot(x, w, x.dtype)
    y = jnp.zeros_like(product, shape=(num_ranks * rows, product.shape[1]))
    for step in range(num_ranks):
        shard = (rank + step) % num_ranks
        y = lax.dynamic_update_slice_in_dim(y, product, shard * rows, 0)
        if step + 1 < num_ranks:
            x = lax.ppermute(x, AXIS, _to_lower(num_ranks))
            product = dot(x, w, x.dtype)
    return y


def ring_dot_scatter(x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """Adds the own product to a travelling sum: the GEMM+RS ring.

    Sums move to the higher rank, so in step s rank r adds what belongs to rank
    (r - 1 - s) mod P, and the last one is its own.
    """
    num_ranks, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
    rows = x.shape[0] // num_ranks

    def product(step: int) -> jax.Array:
        owner = (rank - 1 - step) % num_ranks
        return dot(lax.dynamic_slice_in_dim(x, owner * rows, rows), w, x.dtype)

    total = product(0)
    for step in range(1, num_ranks):
        total = product(step) + lax.ppermute(total, AXIS, _to_higher(num_ranks))
    return total


def ring_gather(x: jax.Array) -> jax.Array:
    """The all-gather as a ring."""
    return ring_gather_dot(x, x, lambda shard, _, dtype: shard.astype(dtype))


def ring_dot_all_reduce(x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """The GEMM+AR ring: the sums are scattered, then gathered."""
    return ring_gather(ring_dot_scatter(x, w, dot))


def naive_pair(x: jax.Array, w1: jax.Array, w2: jax.Array, dy: jax.Array) -> tuple:
    """A column then a row linear, forward and backward, as people write it."""

    def forward(x, w1, w2):
        return naive_row(naive_column(x, w1), w2)

    y, backward = jax.vjp(forward, x, w1, w2)
    return (y, *backward(dy))


def naive_backward(
    x: jax.Array, w1: jax.Array, hidden: jax.Array, w2: jax.Array, dy: jax.Array
) -> tuple:
    """The backward of both, from what their forward has left."""
    d_hidden, dw2 = jax.vjp(naive_row, hidden, w2)[1](dy)
    return (*jax.vjp(naive_column, x, w1)[1](d_hidden), dw2)


def naive_gemm(
    a: jax.Array, b: jax.Array, layout: str, *addends: jax.Array
) -> jax.Array:
    """A GEMM with what is added to it, as people write it."""
    y = naive(a, b, layout)
    for addend in addends:
        y = addend + y.astype(jnp.promote_types(addend.dtype, y.dtype))
    return y


def _to_lower(num_ranks):
    return [(rank, (rank - 1) % num_ranks) for rank in range(num_ranks)]


def _to_higher(num_ranks):
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
