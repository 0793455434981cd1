"""Benchmarks of every op against XLA: `python -m jax_ub bench`.

docs/bench/README.md explains the peers, the limits and the interleaved timing.
"""
