"""Flax linen modules whose GEMMs overlap with collective communication."""

from jax_ub.flax.linen.layer_norm_linear import LayerNormLinear as LayerNormLinear
from jax_ub.flax.linen.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from jax_ub.flax.linen.linear import Linear as Linear
from jax_ub.flax.linen.multi_head_attention import (
    MultiHeadAttention as MultiHeadAttention,
)
from jax_ub.flax.linen.overlap import Overlap as Overlap
from jax_ub.flax.linen.transformer_layer import TransformerLayer as TransformerLayer
