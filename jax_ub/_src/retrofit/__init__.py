"""Overlap for existing Flax layers: `ub.dot_general` and `ub.overlap`."""
