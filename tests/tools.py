"""Programs that tests need, and that not every machine has."""

import shutil

import pytest


def tool(name: str) -> str:
    """Where a program lies; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here")
    return path
