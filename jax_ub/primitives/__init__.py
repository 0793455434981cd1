"""JAX primitives: one file per FFI target, with its shapes and its reference."""
