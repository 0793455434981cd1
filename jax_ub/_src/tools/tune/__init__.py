"""Measures the fastest method for each linear layer: `python -m jax_ub tune`."""
