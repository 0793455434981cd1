"""Flax modules whose GEMMs overlap with their communication."""

from jax_ub.flax import linen as linen
from jax_ub.flax.linear import Linear as Linear
from jax_ub.flax.linear import MainGrad as MainGrad
