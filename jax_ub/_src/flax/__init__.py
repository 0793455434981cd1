"""Flax nnx modules."""
