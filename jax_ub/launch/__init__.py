"""Starts the processes of a job on this machine, and leaves none behind."""
