"""The public per-device functions and their derivatives."""
