"""Explains which communication of a program overlaps, which does not, and why."""
