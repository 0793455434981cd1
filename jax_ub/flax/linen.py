"""Flax linen modules whose GEMMs overlap with collective communication."""

from jax_ub._src.flax.linen_layers import (
    LayerNormLinear,
    LayerNormMLP,
    MultiHeadAttention,
    TransformerLayer,
)
from jax_ub._src.flax.linen_linear import Linear
from jax_ub._src.retrofit.linen_overlap import Overlap

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiHeadAttention",
    "Overlap",
    "TransformerLayer",
]
