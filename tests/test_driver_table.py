"""The CUDA driver's table: types and versions of its functions are those of CUDA."""

import pathlib
import re
import subprocess

import pytest
from tools import tool

CSRC = pathlib.Path(__file__).parents[1] / "csrc"


@pytest.fixture(scope="module")
def symbols():
    """Returns member, name and version of every driver symbol."""
    text = (CSRC / "platform/cuda/driver.cc").read_text()
    table = text.partition("kSymbols[] = {")[2].partition("\n};")[0]
    entry = r'\{offsetof\(Driver, (\w+)\),\s*"(cu\w+)",\s*(\d+)'
    found = re.findall(entry, table)
    assert len(found) == table.count("offsetof") > 60
    return found


def errors_of(symbols, tmp_path):
    """Returns the compiler's errors for members of the wrong type."""
    nvcc, compiler = tool("nvcc"), tool("g++")
    lines = [
        f"static_assert(std::is_same_v<decltype(jax_ub::Driver::{member}), "
        f'PFN_{name}_v{version}>, "{name}");'
        for member, name, version in symbols
    ]
    headers = ["<cudaTypedefs.h>", "<type_traits>", '"platform/cuda/driver.h"']
    source = tmp_path / "table.cc"
    source.write_text("\n".join([*(f"#include {one}" for one in headers), *lines]))
    said = subprocess.run(
        [nvcc, "-E", "-M", "-x", "c++", source, f"-I{CSRC}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (typedefs,) = set(re.findall(r"\S+/cudaTypedefs\.h", said))
    include = pathlib.Path(typedefs).parent
    options = ("-std=c++20", "-fsyntax-only", f"-I{CSRC}", "-isystem", include)
    return subprocess.run(
        [compiler, *options, source], capture_output=True, text=True, check=False
    ).stderr


def test_every_function_has_the_type_of_its_version(symbols, tmp_path):
    assert errors_of(symbols, tmp_path) == ""


def test_a_function_of_another_type_is_found(symbols, tmp_path):
    other = [
        (member, "cuMemAlloc" if name == "cuMemFree" else name, version)
        for member, name, version in symbols
    ]
    errors = errors_of(other, tmp_path)
    assert errors.count("static assertion failed: cuMemAlloc\n") == 1
    assert errors.count("error: ") == 1
