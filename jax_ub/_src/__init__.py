"""The implementation of jax_ub. Its names may change in any release."""
