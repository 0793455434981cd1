"""The import rules: a layer imports only itself, lower layers and shared modules."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jax_ub"
SRC = PACKAGE / "_src"

# The layers of jax_ub/_src, lowest first. A module may import its own layer and lower
# ones. Layers of one row do not import each other.
LAYERS = [
    {"_cpu", "_cuda"},
    {"errors", "dtypes", "scalars"},
    {"output", "checks", "parallel"},
    {"arguments"},
    {"methods"},
    {"lowering_log", "config", "reference"},
    {"scaled_array"},
    {"runtime"},
    {"prediction"},
    {"primitives"},
    {"fp8"},
    {"rules"},
    {"sharding"},
    {"ops", "retrofit", "flax"},
    {"tools"},
]
# Imports that are inside functions only, so that importing the library loads no tool.
LAZY = {("ops", "tools")}
# The tools that import the public modules, as a program does.
USERS = {"bench", "doctor", "trace", "tune", "explain"}

# The folders of csrc whose headers a folder's files may include. Code for CPUs and for
# CUDA is in subfolders of these names.
CSRC = ROOT / "csrc"
CSRC_LAYERS = {
    "platform": {"platform"},
    "gemm": {"gemm", "reduce", "platform"},
    "reduce": {"gemm", "reduce", "platform"},
    "quantize": {"quantize", "gemm", "platform"},
    "schedule": {"schedule"},
    "transport": {"transport", "gemm", "reduce", "platform"},
    "engine": {"engine", "transport", "schedule", "gemm", "reduce", "platform"},
    "ffi": {"ffi", "engine", "quantize", "platform", "xla"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module):
    """Returns the layer of a module of jax_ub, or "public"."""
    parts = module.split(".")[1:]
    if parts[:1] == ["_src"]:
        return parts[1] if parts[1:] else "_src"
    return parts[0] if parts and parts[0] in {"_cpu", "_cuda"} else "public"


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(tree):
    """Yields the modules of jax_ub that statements in `tree` import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.module.split(".")[0] == "jax_ub":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name for name in names if name.split(".")[0] == "jax_ub")


def level(layer):
    return next(n for n, row in enumerate(LAYERS) if layer in row)


@pytest.mark.parametrize(
    "path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC))
)
def test_imports_point_down(path):
    own = layer_of(name_of(path))
    tree = ast.parse(path.read_text())
    allowed = {own}
    if own != "_src":
        allowed |= set().union(*LAYERS[: level(own)])
    at_import = ast.Module([s for s in tree.body if not _is_lazy(s)], [])
    lazily = allowed | {other for layer, other in LAZY if layer == own}
    assert {layer_of(name) for name in imported(at_import)} - {"public"} <= allowed
    assert {layer_of(name) for name in imported(tree)} - {"public"} <= lazily
    parts = path.relative_to(SRC).parts
    if "public" in {layer_of(name) for name in imported(tree)}:
        assert parts[0] == "tools", "only tools import public modules"
        assert parts[1].removesuffix(".py") in USERS


def _defines(statement):
    return isinstance(statement, ast.FunctionDef | ast.ClassDef)


def _is_lazy(statement):
    """Returns whether a statement's imports do not run when the module is imported."""
    type_checking = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(
        statement.test
    )
    return _defines(statement) or type_checking


def test_public_modules_define_nothing():
    entry_points = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
    for path in set(PACKAGE.rglob("*.py")) - set(SRC.rglob("*")) - entry_points:
        defined = [s for s in ast.parse(path.read_text()).body if _defines(s)]
        assert not defined, path


def loaded_by(statement):
    """Returns the modules of jax_ub that a statement loads in a new process."""
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    return {name for name in names if name.split(".")[0] == "jax_ub"}


@pytest.mark.slow
def test_importing_the_library_loads_no_other_module():
    assert loaded_by("import jax_ub") == {"jax_ub"}


@pytest.mark.slow
def test_a_linear_layer_loads_only_the_modules_of_calls():
    loaded = loaded_by("from jax_ub import linear")
    layers = {layer_of(name) for name in loaded}
    assert not layers & {"sharding", "retrofit", "ops", "flax", "prediction", "tools"}
    # FP8, and what connects processes or configures named overlaps, are loaded by the
    # programs that use them.
    assert not loaded & {
        f"jax_ub._src.{name}"
        for name in (
            "config.ub_cfgs",
            "fp8.quantize",
            "fp8.recipes",
            "fp8.state",
            "rules.scaled",
            "runtime.backend",
            "runtime.bootstrap",
            "runtime.connection_attempt",
            "runtime.initialize",
            "runtime.initialize_args",
            "runtime.memory",
            "runtime.process_all_gather",
            "runtime.transports",
        )
    }


@pytest.mark.slow
def test_public_modules_load_no_tool():
    loaded = loaded_by("import jax_ub.flax, jax_ub.flax.linen, jax_ub.ops, jax_ub.fp8")
    layers = {layer_of(name) for name in loaded}
    assert {"flax", "ops", "fp8"} <= layers
    assert not layers & {"prediction", "tools"}


@pytest.mark.slow
def test_a_jitted_step_is_traced_once():
    # JAX traces every program again after an import that adds a config option, as
    # jax.extend's does. A second trace also gives a new call site.
    program = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import jax_ub as ub
jax.config.update("jax_num_cpu_devices", 2)
traces = []
def step(x, w, main_grad):
    traces.append(x)
    def loss(w, main_grad):
        options = {"parallel": "column", "axis_name": "tp"}
        return ub.linear(x, w, main_grad=main_grad, **options).sum()
    return jax.grad(loss, 1)(w, main_grad)
mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
specs = P("tp"), P(None, "tp"), P(None, "tp")
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[2]))
operands = jnp.ones((8, 16)), jnp.ones((16, 8)), jnp.ones((16, 8))
jax.block_until_ready([step(*operands), step(*operands)])
print(len(traces))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_only_the_settings_read_the_environment():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        # The launcher sets the environment of the processes that it starts.
        if "os.environ" in path.read_text() and "launch" not in path.parts
    }
    assert readers <= {"_src/runtime/settings.py"}


def test_derivatives_are_defined_in_rules_fp8_and_operation_groups_only():
    definers = {
        str(path.relative_to(SRC))
        for path in MODULES
        if re.search(r"jax\.custom_vjp|custom_vjp\(", path.read_text())
    }
    assert {name for name in definers if not name.startswith("rules/")} == {
        "fp8/quantize.py",
        "fp8/state.py",
        "ops/group.py",
    }


CSRC_FILES = sorted(
    p for p in CSRC.rglob("*") if p.suffix in {".cc", ".h", ".cu", ".cuh"}
)


def includes(path):
    """Returns the files that a file includes in quotes, and in angle brackets."""
    text = path.read_text()
    return (
        set(re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)),
        set(re.findall(r"^#include <([^>]+)>", text, re.MULTILINE)),
    )


def test_includes_point_down():
    for path in CSRC_FILES:
        layer = path.relative_to(CSRC).parts[0]
        if layer in CSRC_LAYERS:  # the extension modules may include all folders
            found = {n.split("/")[0] for n in includes(path)[0] if "/" in n}
            assert found <= CSRC_LAYERS[layer], path


def test_only_cuda_includes_cuda():
    allowed = {path for path in CSRC_FILES if "/cuda/" in str(path)}
    assert allowed
    for path in set(CSRC_FILES) - allowed - {CSRC / "module_cuda.cc"}:
        own, system = includes(path)
        assert not {name for name in own if "/cuda/" in name}, path
        assert not {name for name in system if name.startswith("cu")}, path


def test_the_host_part_of_cuda_needs_the_drivers_headers_only():
    # So any C++ compiler can build it, and CUDA's runtime is not linked.
    allowed = {"cuda.h", "cudaTypedefs.h"}
    for path in CSRC_FILES:
        if path.suffix != ".cu":
            assert {n for n in includes(path)[1] if n.startswith("cu")} <= allowed


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


def test_no_module_has_a_vague_name():
    vague = {"utils", "util", "common", "helpers", "misc", "base", "manager", "data"}
    assert not [str(path) for path in sources() if path.stem in vague]


def test_every_target_has_its_primitive_and_its_test():
    text = "".join(p.read_text() for p in (SRC / "primitives").glob("*.py"))
    targets = re.findall(r'^    op = "(\w+)"', text, re.M)
    assert targets
    for target in targets:
        assert (ROOT / f"tests/primitives/test_{target}.py").exists()
