"""Flax nnx modules whose GEMMs overlap with collective communication."""

from jax_ub._src.flax.attention import MultiHeadAttention, TransformerLayer
from jax_ub._src.flax.linear import Linear, MainGrad, with_main_grads
from jax_ub._src.flax.norm_layers import LayerNormLinear, LayerNormMLP
from jax_ub._src.fp8.flax_state import OverwriteWithGradient
from jax_ub.flax import linen

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MainGrad",
    "MultiHeadAttention",
    "OverwriteWithGradient",
    "TransformerLayer",
    "linen",
    "with_main_grads",
]
