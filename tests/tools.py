"""Programs that tests need and that some machines lack."""

import shutil

import pytest


def tool(name: str) -> str:
    """Returns the path of a program; skips the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here")
    return path
