"""JAX primitives, one per FFI target, with shapes and `jax.lax` implementation."""
