"""The names that code outside the project relies on, and their signatures."""

import builtins
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

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
    "all_reduce": "x, *, axis_name, bias=None, residual=None",
    "dgrad_add": "dy, w, residual",
    "wgrad_accumulate": "x, dy, main_grad",
    "initialize_ub": "shape, tp_size, use_fp8=False, quantization_modes=None, "
    "dtype=jnp.bfloat16, ub_cfgs=None, bootstrap_backend=None, *, mesh=None, "
    'axis_name="tp"',
    "quantize": 'x, recipe=None, *, role="input", state=None, axis_name=None',
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


NAMES = {
    "jax_ub": """
        CommOverlap CommOverlapP2P CommOverlapType MemoryReport Method
        ScaledArray UserBufferQuantizationMode all_gather_matmul all_reduce
        check_communicators destroy_ub dgrad_add dot_general errors explain
        export_safety_checks fallbacks flax fp8 get_ub initialize_ub is_ub_initialized
        linear matmul_all_reduce matmul_reduce_scatter memory_report ops overlap
        overlap_config overlapped quantize register_targets trace wgrad_accumulate
    """,
    "jax_ub.errors": """
        CommunicatorError ConfigurationError ConfigurationTypeError FusionError
        InputError LifecycleError OutputError ShapeContractError TimeoutError TraceError
        UbError UnknownArgumentError UnknownNameError UnknownOverlapError
        UnsupportedOverlapError raised
    """,
    "jax_ub.flax": """
        LayerNormLinear LayerNormMLP Linear MainGrad MultiHeadAttention
        OverwriteWithGradient TransformerLayer linen with_main_grads
    """,
    "jax_ub.flax.linen": """
        LayerNormLinear LayerNormMLP Linear MultiHeadAttention Overlap
        TransformerLayer
    """,
    "jax_ub.fp8": """
        DelayedScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling QParams
        RowwiseScaling apply_updates init_state quantize_params
    """,
    "jax_ub.ops": """
        AddExtraInput AllGather AllReduce BasicLinear BasicOperation Bias
        ConstantScale Dropout FusedOperation GEGLU GELU Identity LayerNorm Linear
        MakeExtraOutput OperationFuser Quantize RMSNorm ReLU ReduceScatter Reshape
        Sequential SiLU SwiGLU fuse_windows fused gradients_of_main_grads
        merge_fp8_states merge_main_grads register_backward_fusion
        register_forward_fusion register_joint_fusion split_fp8_states split_main_grads
        unregister_fusion without_fusions
    """,
    "jax_ub.ops.fused": """
        BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd
        BackwardLinearScale ForwardLinearBiasActivation ForwardLinearBiasAdd
        ForwardLinearScaleAdd UserbuffersBackwardLinear UserbuffersForwardLinear
    """,
    "jax_ub.overlap_config": """
        CommOverlapType OverlapConfig UserBufferQuantizationMode from_te
    """,
}
PUBLIC = {
    f"{module}.{name}": getattr(importlib.import_module(module), name)
    for module in NAMES
    for name in NAMES[module].split()
}
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(PUBLIC[name])]
CLASSES = [name for name in PUBLIC if inspect.isclass(PUBLIC[name])]
# These functions raise no error of jax_ub: they only inspect state or trees, or do
# nothing if there is no state.
RAISE_NOTHING = {
    *("jax_ub.memory_report", "jax_ub.overlapped", "jax_ub.register_targets"),
    *("jax_ub.ops.split_fp8_states", "jax_ub.ops.split_main_grads"),
    "jax_ub.ops.without_fusions",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_a_docstring(name):
    function, text = PUBLIC[name], PUBLIC[name].__doc__
    signature = inspect.signature(function)
    assert ("Args:" in text) == bool(signature.parameters)
    for parameter in signature.parameters:
        assert re.search(rf"^ +\**{parameter}: ", text, re.MULTILINE), parameter
    returns = signature.return_annotation not in (None, Iterator[None])
    assert ("Returns:" in text or "Yields:" in text) == returns
    assert ("Raises:" in text) == (name not in RAISE_NOTHING)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_annotated(name):
    signature = inspect.signature(PUBLIC[name])
    types = [parameter.annotation for parameter in signature.parameters.values()]
    assert inspect.Signature.empty not in [*types, signature.return_annotation]
    # Without this file, type checkers ignore all annotations.
    assert (pathlib.Path(ub.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_public_name_states_its_source(name):
    is_error = name in CLASSES and issubclass(PUBLIC[name], Exception)
    assert is_error or "Transformer Engine: " in re.sub(
        r"\s+", " ", PUBLIC[name].__doc__
    )


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
def test_modules_for_nnx_and_linen_exist(kind, name):
    assert "Maps `[..., tokens" in getattr(kind, name).__call__.__doc__


# Everything that users may import. Additions need a docstring and docs/ pages.
@pytest.mark.parametrize("module", NAMES)
def test_public_modules_have_the_listed_names(module):
    module_object = importlib.import_module(module)
    assert sorted(module_object.__all__) == sorted(NAMES[module].split())
    assert all(hasattr(module_object, name) for name in module_object.__all__)


def test_every_error_that_a_public_function_documents_is_public():
    private = []
    for module in NAMES:
        for name in NAMES[module].split():
            public = getattr(importlib.import_module(module), name)
            members = vars(public).values() if inspect.isclass(public) else ()
            for documented in (public, *filter(callable, members)):
                raises = str(documented.__doc__).partition("Raises:\n")[2]
                errors = re.findall(r"^ +(\w+Error):", raises, re.MULTILINE)
                known = {*vars(ub.errors), *vars(builtins)}
                private += [(name, error) for error in errors if error not in known]
    assert not private


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import jax_ub.simulate",
        "import jax_ub; jax_ub.methods",
        "from jax_ub.ops.operation import fuse_windows",
    ],
)
def test_old_modules_are_deprecated(program):
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "DeprecationWarning: jax_ub." in done.stderr


def test_errors_belong_to_their_families():
    assert issubclass(ub.errors.ShapeContractError, ValueError)
    assert issubclass(ub.errors.UnknownNameError, ValueError)
    assert issubclass(ub.errors.UnsupportedOverlapError, NotImplementedError)
    assert issubclass(ub.errors.CommunicatorError, RuntimeError)
    assert issubclass(ub.errors.TimeoutError, ub.errors.CommunicatorError)


@pytest.mark.slow
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
