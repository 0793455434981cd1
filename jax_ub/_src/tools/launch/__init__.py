"""Starts the processes of a job on this machine, and ends all of them with the job."""
