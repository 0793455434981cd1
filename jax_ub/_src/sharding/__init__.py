"""Linear layers on global arrays."""
