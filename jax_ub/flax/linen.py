"""Flax linen modules whose GEMMs overlap with collective communication."""

from jax_ub._src.flax.linen.layer_norm_linear import LayerNormLinear
from jax_ub._src.flax.linen.layer_norm_mlp import LayerNormMLP
from jax_ub._src.flax.linen.linear import Linear
from jax_ub._src.flax.linen.multi_head_attention import MultiHeadAttention
from jax_ub._src.flax.linen.overlap import Overlap
from jax_ub._src.flax.linen.transformer_layer import TransformerLayer

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiHeadAttention",
    "Overlap",
    "TransformerLayer",
]
