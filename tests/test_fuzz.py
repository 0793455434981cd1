"""Every invalid argument of a public callable raises an error of the library.

Each failure prints a command that repeats it: `run` with the target's name, the changes
and the seed, in this folder. For example:

    python -c 'import test_fuzz; test_fuzz.run("linear", [("x", "key")], "linear 3")'
"""

import inspect
import typing

import bad_values
import fuzz_commands
import fuzz_operations
import fuzz_targets
import pytest
from flax import nnx

import jax_ub as ub
import jax_ub.flax
from jax_ub import __main__, ops
from jax_ub._src.fp8.recipes import Recipe

TARGETS = {
    **fuzz_targets.TARGETS,
    **fuzz_operations.FUSED,
    **fuzz_operations.LISTS,
    **fuzz_operations.FUNCTIONS,
    **fuzz_commands.COMMANDS,
    **fuzz_commands.FILES,
}


@pytest.fixture(autouse=True)
def _in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values are names of files that are written


def run(name, changes, seed):
    try:
        bad_values.run(TARGETS[name], changes, seed)
    except AssertionError as error:
        again = f"import test_fuzz; test_fuzz.run({name!r}, {changes!r}, {seed!r})"
        raise AssertionError(f"{error}\npython -c {again!r}") from error.__cause__


@pytest.mark.parametrize("name", TARGETS)
def test_valid_arguments_are_accepted(name):
    bad_values.run(TARGETS[name], [], "")


@pytest.mark.parametrize("name", TARGETS)
def test_invalid_arguments_raise_an_error_of_the_library(name):
    for number in range(6):
        seed = f"{name} {number}"
        run(name, bad_values.random_changes(TARGETS[name], seed), seed)


# Values that once raised an error of Python, JAX or Flax.
ONCE = [
    ("nnx Linear", "precision", "a string without a repr"),
    ("linear", "fp8_state", "nested list"),
    ("all_gather_matmul", "fp8_state", "nested dict"),
    ("ops.Reshape", "shape", "10**5000"),
    ("ops.SwiGLU", "glu_interleave_size", "10**5000"),
    ("ops.Dropout", "axis_name", "a string without a repr"),
    ("ops.RMSNorm", "eps", "2**63"),
    ("get_ub", "axis_name", "long string"),
    ("initialize_ub", "axis_name", "a string without a repr"),
    ("dot_general", "dimension_numbers", "{}"),
    ("dot_general", "dimension_numbers", "a generator"),
    ("trace", "path", "null byte"),
    ("trace", "path", "surrogate"),
    ("command simulate", "--tokens", "9" * 5000),
    ("nnx Linear", "preferred_element_type", "(array, array)"),
    ("nnx Linear", "mesh", "another mesh"),
    ("nnx LayerNormLinear", "epsilon", "2**63"),
    ("nnx LayerNormLinear", "inputs", "array i4"),
    ("linen LayerNormLinear", "inputs", "array f8"),
    ("nnx MultiHeadAttention", "attention_fn", "an unhashable function"),
    ("nnx MultiHeadAttention", "inputs", "array [8]"),
    ("linen MultiHeadAttention", "qk_norm_type", "np f64"),
    ("nnx TransformerLayer", "qk_norm_type", "raises in repr"),
    ("get_ub", "use_fp8", "10**5000"),
    ("linear", "fp8_state", "()"),
    ("initialize_ub", "dtype", "{1: {}}"),
    ("JAX_UB_", "JAX_UB_TUNED", "x" * 10_000),
    ("ops.fuse_windows", "ops", "3"),
    ("ops.fuse_windows", "match", "3"),
    ("ops.fuse_windows", "match", "a function that returns a string"),
    ("ops.ForwardLinearBiasAdd.fuse_forward_ops", "ops", "{'a': 1}"),
    ("ops.UserbuffersBackwardLinear.fuse_backward_ops", "ops", "(1, 2, 3)"),
    ("ops.unregister_fusion", "fusion", "np [4, 8]"),
    ("ops.merge_main_grads", "weights", "{raises in repr: 1}"),
    ("Sequential.extend", "ops", "deleted array"),
    ("OperationFuser.fused", "direction", "'tp'"),
    ("Sequential.insert", "index", "'tp'"),
    ("Sequential.__getitem__", "index", "'tp'"),
    ("quantize", "state", "np [4, 8]"),
    ("quantize with a state", "state", "{raises in repr: 1}"),
    ("apply_updates", "gradients", "object()"),
    ("apply_updates", "gradients", "np bool"),
    ("fp8.DelayedScaling", "amax_compute_algo", "np [4, 8]"),
    ("fp8.Float8CurrentScaling", "fp8_dpa", "raises in bool"),
    ("fp8.MXFP8BlockScaling", "enable_2d_quantization", "array [0, 8]"),
]


@pytest.mark.parametrize(("name", "argument", "value"), ONCE)
def test_a_value_that_raised_another_error_is_rejected(name, argument, value):
    run(name, [(argument, value)], "")


@pytest.mark.matrix
@pytest.mark.parametrize("name", TARGETS)
def test_every_bad_value_of_every_argument(name):
    target = TARGETS[name]
    for argument in target.arguments:
        for value in target.values:
            run(name, [(argument, value)], f"{name} {argument} {value!a}")


@pytest.mark.matrix
@pytest.mark.parametrize("name", TARGETS)
def test_more_random_arguments(name):
    for number in range(6, 200):
        seed = f"{name} {number}"
        run(name, bad_values.random_changes(TARGETS[name], seed), seed)


# Public functions that have no arguments.
WITHOUT_TARGET = {
    *("check_communicators", "fallbacks", "memory_report", "register_targets"),
}


def test_every_public_function_has_a_target():
    public = {
        name
        for module in (ub, ub.fp8)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    assert public - WITHOUT_TARGET <= set(TARGETS)


def test_every_recipe_has_a_target():
    recipes = {kind.__name__ for kind in typing.get_args(Recipe)}
    assert {f"fp8.{name}" for name in recipes} <= set(TARGETS)


def test_every_command_has_a_target():
    commands = {f"command {name}" for name in __main__._COMMANDS}
    # The doctor runs its checks with any options; test_bad_input.py tests it.
    assert commands - {"command doctor"} <= set(TARGETS)


def test_every_layer_has_a_target():
    layers = {
        f"{kind} {name}"
        for kind, module in (("nnx", jax_ub.flax), ("linen", jax_ub.flax.linen))
        for name, found in vars(module).items()
        if inspect.isclass(found)
        and not issubclass(found, nnx.Variable)
        and name != "Overlap"
    }
    assert layers <= set(TARGETS)


def test_every_operation_has_a_target():
    operations = {
        f"ops.{name}"
        for name, found in vars(ops).items()
        if inspect.isclass(found) and issubclass(found, ops.BasicOperation)
    }
    operations |= {
        f"ops.fused.{name}"
        for name, found in vars(ops.fused).items()
        if inspect.isclass(found) and not name.startswith("_")
    }
    operations |= {
        f"ops.{name}" for name in ops.__all__ if inspect.isfunction(getattr(ops, name))
    }
    assert operations - {"ops.BasicOperation"} <= set(TARGETS)
