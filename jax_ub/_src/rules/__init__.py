"""The public per-device functions and their derivative rules."""
