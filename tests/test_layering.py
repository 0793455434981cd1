"""The import rules: a layer imports itself, what is below, and the leaves."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jax_ub"

# Each layer may import the ones that are named with it, and every leaf.
LAYERS = {
    "ops": {"ops", "rules", "primitives", "runtime", "explain", "simulate"},
    "flax": {"flax", "retrofit", "rules", "runtime"},
    "retrofit": {"retrofit", "rules", "runtime"},
    "rules": {"rules", "primitives", "runtime"},
    "primitives": {"primitives", "runtime"},
    "explain": {"explain", "tracing", "simulate", "primitives", "runtime"},
    "tracing": {"tracing", "simulate", "initialize", "rules", "runtime", "launch"},
    "simulate": {"simulate", "runtime"},
    "initialize": {"initialize", "primitives", "runtime"},
    "runtime": {"runtime"},
    "launch": {"launch"},
}
# Each leaf may import the leaves after it.
LEAVES = [
    "reference",
    "overlap_config",
    "methods",
    "arguments",
    "shapes",
    "pictures",
    "outputs",
    "errors",
    "_cpu",
    "_cuda",
]
# These show, measure and start the library, with everything that is public.
OUTSIDE = {"bench", "tune", "__main__", "doctor", "__init__"}

# The same of csrc: what a folder's files may include, besides the system's headers. How
# the CPU and CUDA do it lies in folders of these names below.
CSRC = ROOT / "csrc"
CSRC_LAYERS = {
    "platform": {"platform"},
    "gemm": {"gemm", "reduce", "platform"},
    "reduce": {"gemm", "reduce", "platform"},
    "schedule": {"schedule"},
    "transport": {"transport", "gemm", "reduce", "platform"},
    "engine": {"engine", "transport", "schedule", "gemm", "reduce", "platform"},
    "ffi": {"ffi", "engine", "platform", "xla"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def own_layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def may_import(own, other):
    if own in OUTSIDE:
        return True
    if other in LEAVES:
        return own in LAYERS or LEAVES.index(other) >= LEAVES.index(own)
    return own in LAYERS and other in LAYERS[own]


def imported_layers(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "jax_ub":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("jax_ub."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (name[1] for name in names if name[0] == "jax_ub" and name[1:])


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = own_layer(path)
    forbidden = {other for other in imported_layers(path) if not may_import(own, other)}
    assert not forbidden, f"{own} may not import {sorted(forbidden)}"


def test_only_the_settings_read_the_environment():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        # A launcher makes the environment of others.
        if "os.environ" in path.read_text()
        and own_layer(path) not in OUTSIDE | {"launch"}
    }
    assert readers <= {"runtime/settings.py"}


def test_derivatives_are_defined_in_rules_only():
    definers = {
        own_layer(path) for path in MODULES if "custom_vjp(" in path.read_text()
    } | {own_layer(path) for path in MODULES if "jax.custom_vjp" in path.read_text()}
    assert definers == {"rules"}


CSRC_FILES = sorted(
    p for p in CSRC.rglob("*") if p.suffix in {".cc", ".h", ".cu", ".cuh"}
)


def includes(path):
    """What it includes in quotes, and in angle brackets."""
    text = path.read_text()
    return (
        set(re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)),
        set(re.findall(r"^#include <([^>]+)>", text, re.MULTILINE)),
    )


def test_includes_point_down():
    for path in CSRC_FILES:
        layer = path.relative_to(CSRC).parts[0]
        if layer in CSRC_LAYERS:  # the modules are above all
            found = {n.split("/")[0] for n in includes(path)[0] if "/" in n}
            assert found <= CSRC_LAYERS[layer], path


def test_only_cuda_includes_cuda():
    allowed = {path for path in CSRC_FILES if "/cuda/" in str(path)}
    assert allowed
    for path in set(CSRC_FILES) - allowed - {CSRC / "module_cuda.cc"}:
        own, system = includes(path)
        assert not {name for name in own if "/cuda/" in name}, path
        assert not {name for name in system if name.startswith("cu")}, path


def test_the_host_part_of_cuda_needs_the_drivers_header_only():
    # So that any compiler builds it, and nothing of CUDA's runtime is linked.
    for path in CSRC_FILES:
        if path.suffix != ".cu":
            assert {n for n in includes(path)[1] if n.startswith("cu")} <= {"cuda.h"}


def test_xla_is_included_in_ffi_only_and_nanobind_in_the_modules_only():
    for path in CSRC_FILES:
        folder = path.relative_to(CSRC).parent.parts[:1]
        own, system = includes(path)
        assert folder == ("ffi",) or not {n for n in own if n.startswith("xla/")}, path
        assert not folder or not {n for n in system if "nanobind" in n}, path


def sources():
    folders = ("jax_ub", "csrc", "tests", "examples")
    suffixes = {".py", ".cc", ".h", ".cu", ".cuh"}
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                yield path


def test_no_file_is_longer_than_500_lines():
    long = [str(p) for p in sources() if len(p.read_text().splitlines()) > 500]
    assert not long


def test_every_room_has_a_noun_of_its_own():
    vague = {"utils", "util", "common", "helpers", "misc", "base", "manager", "data"}
    assert not [str(path) for path in sources() if path.stem in vague]


def test_every_target_has_its_primitive_and_its_test():
    targets = [
        path.stem
        for path in (PACKAGE / "primitives").glob("*.py")
        if 'target = "jax_ub$' in path.read_text()
    ]
    assert targets
    for target in targets:
        assert f'"jax_ub${target}"' in (PACKAGE / f"primitives/{target}.py").read_text()
        assert (ROOT / f"tests/primitives/test_{target}.py").exists()
