"""Overlap for models that exist already, and the layouts that its layers agree on."""

from jax_ub.retrofit.dot_general import dot_general as dot_general
from jax_ub.retrofit.overlap import overlap as overlap
from jax_ub.retrofit.overlap import overlapped as overlapped
