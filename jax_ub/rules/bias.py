"""The gradient of what is added to a GEMM's result."""

import jax
import jax.numpy as jnp

from jax_ub.reference import sum_dtype


def bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    """Sums dy [..., M, N] over all rows in f32, in the dtype of the bias [N]."""
    return None if bias is None else row_sum(dy).astype(bias.dtype)


def row_sum(dy: jax.Array) -> jax.Array:
    """Sums dy [..., M, N] over all rows: f32 [N]."""
    return jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=sum_dtype(dy.dtype))
