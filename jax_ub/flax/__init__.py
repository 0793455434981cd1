"""Flax nnx modules whose GEMMs overlap with collective communication."""

from jax_ub._src.flax.layer_norm_linear import LayerNormLinear
from jax_ub._src.flax.layer_norm_mlp import LayerNormMLP
from jax_ub._src.flax.linear import Linear
from jax_ub._src.flax.main_grad import MainGrad, with_main_grads
from jax_ub._src.flax.multi_head_attention import MultiHeadAttention
from jax_ub._src.flax.transformer_layer import TransformerLayer
from jax_ub.flax import linen

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MainGrad",
    "MultiHeadAttention",
    "TransformerLayer",
    "linen",
    "with_main_grads",
]
