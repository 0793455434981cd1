"""Checks the installation: what is installed and can run here, or why it cannot."""
