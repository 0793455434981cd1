"""The gradient of a layer's bias, a sum over the rows of dy."""

import jax
import jax.numpy as jnp

from jax_ub._src.reference import sum_dtype


def bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    """Returns the gradient of a bias [N]: the sum of dy [..., M, N] over all rows.

    It is summed in f32 and has the dtype of the bias. Without a bias it is None.
    """
    return None if bias is None else row_sum(dy).astype(bias.dtype)


def row_sum(dy: jax.Array) -> jax.Array:
    """Returns the sum over all rows of dy [..., M, N]: f32 [N], or f64 for f64."""
    return jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=sum_dtype(dy.dtype))
