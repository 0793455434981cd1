"""The build files list all sources of the tree."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

TOP = pathlib.Path(__file__).parents[1]
CSRC = TOP / "csrc"


def listed_in(cmake, suffix):
    text = (CSRC / cmake).read_text()
    return re.findall(rf"^\s+([\w/]+\.{suffix})\)?$", text, re.MULTILINE)


def is_cuda(path):
    return path.parent.name == "cuda"


def test_cmake_lists_every_source_once():
    sources = [path for path in CSRC.rglob("*.cc") if path.parent != CSRC]
    for cmake, cuda in (("CMakeLists.txt", False), ("cuda.cmake", True)):
        expected = [str(p.relative_to(CSRC)) for p in sources if is_cuda(p) == cuda]
        assert sorted(listed_in(cmake, "cc")) == sorted(expected)


def test_the_engine_s_common_files_include_no_device():
    for path in (CSRC / "engine").glob("*.*"):
        assert not re.findall(r'#include "engine/(?:cpu|cuda)/', path.read_text()), path


def test_cmake_compiles_every_kernel_once():
    text = (CSRC / "cuda.cmake").read_text()
    call = re.compile(r"^jax_ub_kernels\(k\w+ ([\w/]+\.cu) \d+\)$", re.MULTILINE)
    compiled = call.findall(text)
    kernels = [str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cu")]
    assert sorted(compiled) == sorted(kernels)


def test_every_module_has_one_source():
    assert sorted(p.name for p in CSRC.glob("*.cc")) == ["module.cc", "module_cuda.cc"]
    text = "".join(
        (CSRC / name).read_text() for name in ("CMakeLists.txt", "cuda.cmake")
    )
    assert re.findall(r"jax_ub_module\((\w+ \w+\.cc)", text) == [
        "_cpu module.cc",
        "_cuda module_cuda.cc",
    ]


def test_bazel_finds_every_source_but_those_of_cuda():
    patterns = re.findall(r'"(csrc/[\w/]*\*[\w.]*)"', (TOP / "BUILD").read_text())
    found = {path for pattern in patterns for path in TOP.glob(pattern)}
    sources = [*CSRC.glob("*/**/*.cc"), *CSRC.glob("*/**/*.h")]
    assert found == {path for path in sources if not is_cuda(path)}


def test_bazel_the_citation_and_the_package_have_one_version():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    fallback = project["tool"]["setuptools_scm"]["fallback_version"]
    version = fallback.removesuffix(".dev0")
    assert version != fallback
    module = (TOP / ".bazel/workspace/MODULE.bazel").read_text()
    assert f'version = "{version}"' in module.partition(")")[0]
    citation = (TOP / ".github/CITATION.cff").read_text()
    assert f"version: {version}\n" in citation


def test_the_version_before_the_first_tag_is_a_development_version_of_it(tmp_path):
    pytest.importorskip("setuptools_scm")
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@localhost")

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    def version():
        return run(sys.executable, "-m", "setuptools_scm").partition("+")[0]

    assert version() == "0.1.0.dev0"
    run("git", "init")
    run("git", "add", "pyproject.toml")
    run(*git, "commit", "-m", "first")
    assert version() == "0.1.0.dev1"
    run("git", "tag", "v0.1.0")
    assert version() == "0.1.0"
    run(*git, "commit", "--allow-empty", "-m", "second")
    assert version() == "0.1.1.dev1"


def test_a_kernel_includes_c_headers_and_intrinsics_only():
    # The linker may keep the copy of a C++ library's inline function that was compiled
    # for AVX, and call it on processors without AVX.
    is_kernel = re.compile(r"_(avx|amx)\w*\.cc").search
    todo = {path for path in CSRC.rglob("*.cc") if is_kernel(path.name)}
    seen = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        text = path.read_text()
        system = set(re.findall(r"^#include <([\w./]+)>", text, re.MULTILINE))
        assert system <= {"immintrin.h", "stddef.h", "stdint.h", "string.h"}, path
        own = {CSRC / name for name in re.findall(r'^#include "([\w./]+)"', text, re.M)}
        # Tests replace the intrinsics by emulated ones.
        todo |= {path for path in own if path.exists()} - seen
    assert len(seen) > 3
