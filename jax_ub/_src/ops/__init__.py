"""Fusible operations."""
