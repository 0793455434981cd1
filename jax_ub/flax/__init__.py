"""Flax nnx modules whose GEMMs overlap with collective communication."""

from jax_ub.flax import linen as linen
from jax_ub.flax.layer_norm_linear import LayerNormLinear as LayerNormLinear
from jax_ub.flax.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from jax_ub.flax.linear import Linear as Linear
from jax_ub.flax.main_grad import MainGrad as MainGrad
from jax_ub.flax.main_grad import with_main_grads as with_main_grads
from jax_ub.flax.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from jax_ub.flax.transformer_layer import TransformerLayer as TransformerLayer
