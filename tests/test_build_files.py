"""What is built, and what is kept at the top, is what the tree holds."""

import pathlib
import re
import tomllib

TOP = pathlib.Path(__file__).parents[1]
CSRC = TOP / "csrc"


def test_cmake_lists_every_source_once():
    text = (CSRC / "CMakeLists.txt").read_text()
    listed = re.findall(r"^\s+([\w/]+\.cc)\)?$", text, re.MULTILINE)
    sources = [str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cc")]
    assert sorted([*listed, "module.cc"]) == sorted(sources)


def test_bazel_and_the_package_have_one_version():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    module = (TOP / ".bazel/workspace/MODULE.bazel").read_text()
    assert f'version = "{project["version"]}"' in module.partition(")")[0]


def test_a_kernel_includes_c_headers_and_intrinsics_only():
    # The linker may keep the copy of a C++ library's inline function that was compiled
    # for AVX there, and call it on processors that have none.
    todo = {path for path in CSRC.rglob("*.cc") if re.search(r"_avx\w*\.cc", path.name)}
    seen = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        text = path.read_text()
        system = set(re.findall(r"^#include <([\w./]+)>", text, re.MULTILINE))
        assert system <= {"immintrin.h", "stddef.h", "stdint.h", "string.h"}, path
        own = {CSRC / name for name in re.findall(r'^#include "([\w./]+)"', text, re.M)}
        # Tests put emulated intrinsics in the place of the real ones.
        todo |= {path for path in own if path.exists()} - seen
    assert len(seen) > 3
