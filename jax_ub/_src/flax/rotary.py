"""Rotary position embeddings."""

import jax
import jax.numpy as jnp

from jax_ub._src.reference import with_rank


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Applies rotary position embeddings to queries or keys.

    Rotates each pair of features i and i + D/2 by the angle `position * base**(-2i/D)`,
    as in GPT-NeoX and Llama.

    Args:
        x: queries or keys, `[..., tokens, heads, D]`.
        positions: `[..., tokens]`, or `[tokens]` for all sequences.
        base: base of the angles. The slowest pair rotates by about one radian in `base`
            tokens.

    Returns:
        The rotated array, with the shape and dtype of x. The rotation is in f32.

    Source: RoFormer, https://arxiv.org/abs/2104.09864.
    """
    half = x.shape[-1] // 2
    speeds = float(base) ** -(jnp.arange(half, dtype=jnp.float32) / half)
    positions = positions.astype(jnp.float32)[..., None, None]
    angles = positions * with_rank(speeds, positions.ndim)
    cos, sin = (with_rank(f(angles), x.ndim) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
