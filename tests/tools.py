"""Programs that tests run: the commands of jax_ub, and what some machines lack."""

import shutil
import subprocess
import sys

import pytest


def jax_ub(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `python -m jax_ub ARGUMENTS` in a new process."""
    command = [sys.executable, "-m", "jax_ub", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def tool(name: str) -> str:
    """Returns the path of a program; skips the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here")
    return path
