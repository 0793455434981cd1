"""Flax linen modules."""
