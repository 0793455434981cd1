"""The gradient of what is added to a GEMM's result."""

import jax
import jax.numpy as jnp


def bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    """Sums dy [..., M, N] over all rows in f32, in the dtype of the bias [N]."""
    if bias is None:
        return None
    rows = tuple(range(dy.ndim - 1))
    return jnp.sum(dy, axis=rows, dtype=jnp.float32).astype(bias.dtype)
