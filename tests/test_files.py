"""Tests the writing of files."""

import pathlib

import pytest

from jax_ub._src.files import write_json
from jax_ub.errors import OutputError


def test_full_disk_is_an_error_that_names_the_file():
    with pytest.raises(OutputError, match="cannot write '/dev/full': No space left"):
        write_json(pathlib.Path("/dev/full"), {})
