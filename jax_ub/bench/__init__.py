"""Times every op against XLA, interleaved: `python -m jax_ub bench`.

The peers, the limits and the method are explained in docs/bench/README.md.
"""
