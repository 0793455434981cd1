"""Overlap for layers that exist already: `ub.dot_general` and `ub.overlap`."""
