"""Basic operations, one per file."""
