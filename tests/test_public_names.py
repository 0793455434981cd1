"""The names that code outside the project relies on, and their signatures."""

import inspect
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jax_ub as ub
import jax_ub.flax

SIGNATURES = {
    "all_gather_matmul": "x, w, *, axis_name, bias=None, ub_name=None, method=None, "
    "return_gathered=False, out_dtype=None",
    "matmul_reduce_scatter": "x, w, *, axis_name, bias=None, residual=None, "
    "ub_name=None, method=None, out_dtype=None",
    "matmul_all_reduce": "x, w, *, axis_name, bias=None, residual=None, "
    "ub_name=None, method=None, out_dtype=None",
    "all_reduce": "x, *, axis_name",
    "dgrad_add": "dy, w, residual",
    "wgrad_accumulate": "x, dy, main_grad",
    "initialize_ub": "shape, tp_size, use_fp8=False, quantization_modes=None, "
    "dtype=jnp.bfloat16, ub_cfgs=None, bootstrap_backend=None, *, mesh=None, "
    'axis_name="tp"',
    "get_ub": "name, use_fp8=False",
    "linear": "x, w, b=None, *, parallel=None, axis_name=None, "
    "sequence_parallel=True, ub_name=None, method=None, main_grad=None",
}


def pinned(text):
    namespace: dict = {"jnp": jnp}
    exec(f"def function({text}): pass", namespace)
    return inspect.signature(namespace["function"])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_pinned_one(name):
    found = inspect.signature(getattr(ub, name)).parameters
    for parameter in pinned(SIGNATURES[name]).parameters.values():
        assert found[parameter.name].kind == parameter.kind
        assert found[parameter.name].default == parameter.default
    extra = list(found)[len(pinned(SIGNATURES[name]).parameters) :]
    assert all(found[parameter].default in (None, False) for parameter in extra)


PUBLIC = [name for name, found in vars(ub).items() if getattr(found, "__doc__", None)]
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(ub, name))]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(ub, name))]
# They look at what is there, or do nothing where there is nothing to do.
RAISE_NOTHING = {
    "fallbacks",
    "memory_report",
    "overlapped",
    "register_targets",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_what_it_does(name):
    function, text = getattr(ub, name), getattr(ub, name).__doc__
    signature = inspect.signature(function)
    assert ("Args:" in text) == bool(signature.parameters)
    for parameter in signature.parameters:
        assert re.search(rf"^ +\**{parameter}: ", text, re.MULTILINE), parameter
    returns = signature.return_annotation is not None
    assert ("Returns:" in text or "Yields:" in text) == returns
    assert ("Raises:" in text) == (name not in RAISE_NOTHING)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_says_its_types(name):
    signature = inspect.signature(getattr(ub, name))
    types = [parameter.annotation for parameter in signature.parameters.values()]
    assert inspect.Signature.empty not in [*types, signature.return_annotation]
    # Without it type checkers look at none of them.
    assert (pathlib.Path(ub.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_public_name_says_where_it_is_from(name):
    assert "Transformer Engine: " in getattr(ub, name).__doc__


@pytest.mark.parametrize("kind", [jax_ub.flax, jax_ub.flax.linen])
@pytest.mark.parametrize(
    "name",
    [
        "Linear",
        "LayerNormLinear",
        "LayerNormMLP",
        "MultiHeadAttention",
        "TransformerLayer",
    ],
)
def test_modules_are_there_for_nnx_and_linen(kind, name):
    assert "Maps `[..., tokens" in getattr(kind, name).__call__.__doc__


def test_errors_belong_to_their_families():
    assert issubclass(ub.errors.ShapeContractError, ValueError)
    assert issubclass(ub.errors.UnknownNameError, ValueError)
    assert issubclass(ub.errors.UnsupportedOverlapError, NotImplementedError)
    assert issubclass(ub.errors.CommunicatorError, RuntimeError)
    assert issubclass(ub.errors.TimeoutError, ub.errors.CommunicatorError)


def test_import_starts_no_backend():
    program = (
        "import jax, jax_ub\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(jax.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"
