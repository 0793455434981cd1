"""Programs that jax_ub is compared with: XLA's collectives and dots, ppermute rings.

Every function is per device, inside `jax.shard_map`. A `dot` takes two operands and
the dtype of the result, see `dots.DotVariant`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src.tools.bench.devices import AXIS
from jax_ub._src.tools.bench.dots import Dot, naive


def gather(x: jax.Array) -> jax.Array:
    """All-gathers the rows of all ranks with XLA's collective."""
    return lax.all_gather(x, AXIS, axis=0, tiled=True)


def scatter(x: jax.Array) -> jax.Array:
    """Reduce-scatters the rows over all ranks with XLA's collective."""
    return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


def scatter_and_gather(x: jax.Array) -> jax.Array:
    """Computes an all-reduce as XLA's reduce-scatter followed by its all-gather."""
    return gather(scatter(x))


def all_reduce(x: jax.Array) -> jax.Array:
    """Sums x over all ranks with XLA's all-reduce."""
    return lax.psum(x, AXIS)


def sum_dtypes(dtype: str) -> tuple[str, ...]:
    """Returns the dtypes to reduce partial sums in: the operands' dtype and f32.

    XLA's fastest choice depends on the machine, so both are timed.
    """
    return tuple(dict.fromkeys((dtype, "float32")))


def reduced(
    collective: Callable[[jax.Array], jax.Array], dot: Dot, moved: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a program that computes `collective(dot(x, w))` in the dtype of x.

    `moved` is the dtype of the partial sums that the collective reduces.
    """

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return collective(dot(x, w, moved)).astype(x.dtype)

    return program


def naive_column(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes AG+GEMM with XLA as most users write it: gather, then multiply."""
    return gather(x) @ w


def naive_row(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes GEMM+RS as most users write it: multiply, then reduce-scatter."""
    return scatter(x @ w)


def naive_all_reduce(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes GEMM+AR as most users write it: multiply, then all-reduce."""
    return all_reduce(x @ w)


def ring_gather_dot(x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """Computes AG+GEMM as a ring: multiplies one shard while the next one is sent.

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
    """Computes GEMM+RS as a ring: each rank adds its product to a partial sum.

    Partial sums move to the higher rank. In step s, rank r adds its product for the
    rows of rank (r - 1 - s) mod P; in the last step, these are its own rows.
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
    """All-gathers the rows of all ranks with a ring of ppermutes."""
    return ring_gather_dot(x, x, lambda shard, _, dtype: shard.astype(dtype))


def ring_dot_all_reduce(x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """Computes GEMM+AR as two rings: a reduce-scatter, then an all-gather."""
    return ring_gather(ring_dot_scatter(x, w, dot))


def naive_pair(x: jax.Array, w1: jax.Array, w2: jax.Array, dy: jax.Array) -> tuple:
    """Computes a column and a row linear layer with XLA as most users write them.

    Returns the result and the gradients of x, w1 and w2.
    """

    def forward(x, w1, w2):
        return naive_row(naive_column(x, w1), w2)

    y, backward = jax.vjp(forward, x, w1, w2)
    return (y, *backward(dy))


def naive_backward(
    x: jax.Array, w1: jax.Array, hidden: jax.Array, w2: jax.Array, dy: jax.Array
) -> tuple:
    """Computes the gradients of a column and a row linear layer from saved operands.

    `hidden` is the input of the row layer. Returns the gradients of x, w1 and w2.
    """
    d_hidden, dw2 = jax.vjp(naive_row, hidden, w2)[1](dy)
    return (*jax.vjp(naive_column, x, w1)[1](d_hidden), dw2)


def naive_gemm(
    a: jax.Array, b: jax.Array, layout: str, *addends: jax.Array
) -> jax.Array:
    """Computes a local GEMM of this layout plus `addends`, as most users write it."""
    y = naive(a, b, layout)
    for addend in addends:
        y = addend + y.astype(jnp.promote_types(addend.dtype, y.dtype))
    return y


def _to_lower(num_ranks):
    return [(rank, (rank - 1) % num_ranks) for rank in range(num_ranks)]


def _to_higher(num_ranks):
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
