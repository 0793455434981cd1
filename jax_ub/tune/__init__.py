"""Finds the fastest way to run each linear on this machine: `python -m jax_ub tune`."""
