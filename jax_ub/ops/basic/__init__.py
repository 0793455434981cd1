"""Basic operations, one a file."""
