"""Bad input: an error at trace time that names op, argument, value and fix."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import dp_tp_mesh, tp_mesh
from refusals import refuses, trace, zeros

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.methods import Method
from jax_ub._src.runtime import communicators
from jax_ub.errors import ShapeContractError, UnknownNameError, UnsupportedOverlapError

GEMMS = (ub.all_gather_matmul, ub.matmul_reduce_scatter, ub.matmul_all_reduce)


FITTING = zeros(8, 6), zeros(6, 8)
# Invalid operands or options of any GEMM: the error, its text, and the call.
WRONG_CALLS = {
    "contraction": (
        ShapeContractError,
        r"{op}: x \(8, 6\) has K = 6, but w \(7, 8\) has K = 7",
        (zeros(8, 6), zeros(7, 8)),
        {},
    ),
    "transposed kernel": (
        ShapeContractError,
        r"If w is \[out, in\], pass rhs_transposed=True; w.T would copy it",
        (zeros(8, 6), zeros(9, 6)),
        {},
    ),
    "kernel that is not transposed": (
        ShapeContractError,
        r"w is read as \[out, in\]: leave out rhs_transposed",
        (zeros(8, 6), zeros(6, 9)),
        {"rhs_transposed": True},
    ),
    "too few dimensions": (
        ShapeContractError,
        r"x has shape \(6,\), but the op takes \[..., rows, features\]",
        (zeros(6), zeros(6, 8)),
        {},
    ),
    "kernel of three dimensions": (
        ShapeContractError,
        r"w has shape \(2, 6, 8\), but a kernel is \[in, out\]",
        (zeros(8, 6), zeros(2, 6, 8)),
        {},
    ),
    "integers": (
        ShapeContractError,
        "x is int32, but the op takes float32, bfloat16 or float16. Convert it",
        (zeros(8, 6, dtype="int32"), zeros(6, 8)),
        {},
    ),
    "two dtypes": (
        ShapeContractError,
        "x is bfloat16 and w is float32, but both must have one dtype",
        (zeros(8, 6, dtype="bfloat16"), zeros(6, 8)),
        {},
    ),
    "nothing to compute": (
        ShapeContractError,
        r"x has shape \(0, 6\), which is empty",
        (zeros(0, 6), zeros(6, 8)),
        {},
    ),
    "result of another kind": (
        ShapeContractError,
        "out_dtype = int8 is not a result the op has",
        FITTING,
        {"out_dtype": "int8"},
    ),
    "axis that is not there": (
        ShapeContractError,
        "{op}: axis_name = 'pt', but the mesh of this jax.shard_map has no axis 'pt'. "
        "Known: 'tp'",
        FITTING,
        {"axis_name": "pt"},
    ),
    "bias that is no array": (
        ShapeContractError,
        "{op}: bias is of type float, but the op takes an array",
        FITTING,
        {"bias": 1.0},
    ),
    "name that is no string": (
        UnknownNameError,
        "{op}: ub_name = 3 is not the name of a layer",
        FITTING,
        {"ub_name": 3},
    ),
    "misspelt method": (
        UnknownNameError,
        r"{op} \(ub_name 'qkv'\): method = 'pipelin' is not a method",
        FITTING,
        {"method": "pipelin", "ub_name": "qkv"},
    ),
} | {
    f"axis_name {axis_name!r}": (
        ShapeContractError,
        rf"{{op}}: axis_name = {re.escape(str(axis_name))} is not the name of a mesh "
        r"axis.*axis_name=\"tp\"",
        FITTING,
        {"axis_name": axis_name},
    )
    for axis_name in (None, (), 4)
}


@pytest.mark.parametrize("op", GEMMS)
class TestEveryGemm:
    @pytest.mark.parametrize("wrong", list(WRONG_CALLS))
    def test_wrong_call(self, op, wrong):
        error, text, operands, options = WRONG_CALLS[wrong]
        refuses(
            error,
            text.replace("{op}", op.__name__),
            lambda x, w: op(x, w, **{"axis_name": "tp", **options}),
            *operands,
        )

    def test_bias_of_another_size(self, op):
        refuses(
            ShapeContractError,
            r"bias has shape \(6,\), but here it is \[N\], \(8,\)",
            lambda x, w, b: op(x, w, axis_name="tp", bias=b),
            zeros(8, 6),
            zeros(6, 8),
            zeros(6),
        )

    def test_axis_that_is_left_to_xla(self, op):
        mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
        program = jax.shard_map(
            lambda x, w: op(x, w, axis_name="dp"),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            axis_names={"tp"},
        )
        text = (
            r"axis_name = 'dp' is not a manual mesh axis; only \('tp',\) are. Call it"
        )
        with pytest.raises(ShapeContractError, match=text):
            jax.eval_shape(program, zeros(8, 6), zeros(6, 8))

    @pytest.mark.parametrize("found", [[1.0], None, 3.0], ids=["list", "None", "float"])
    @pytest.mark.parametrize("name", ["x", "w"])
    def test_operand_that_is_no_array(self, op, name, found):
        operands = {"x": zeros(8, 6), "w": zeros(6, 8)} | {name: found}
        kind = type(found).__name__
        refuses(
            ShapeContractError,
            rf"{op.__name__}: {name} is of type {kind}, but the op takes an array",
            lambda: op(operands["x"], operands["w"], axis_name="tp"),
            specs=(),
        )

    def test_bare_call(self, op):
        message = "not a manual mesh axis; no axis is manual.*inside jax.shard_map"
        with pytest.raises(ShapeContractError, match=message):
            op(zeros(8, 6), zeros(6, 8), axis_name="tp")

    def test_axis_of_vmap(self, op):
        message = (
            "axis_name = 'tp' is not a manual mesh axis, but an axis of jax.vmap.* "
            'Call it inside jax.shard_map over all mesh axes, or pass method="xla"'
        )
        with pytest.raises(ShapeContractError, match=message):
            jax.vmap(lambda x: op(x, zeros(6, 8), axis_name="tp"), axis_name="tp")(
                zeros(4, 8, 6)
            )


CALLS_OVER_AN_AXIS = {
    **{op.__name__: lambda x, op=op: op(x, x.T, axis_name="tp") for op in GEMMS},
    "all_reduce": lambda x: ub.all_reduce(x, axis_name="tp"),
    "FP8 scale of quantize": lambda x: ub.quantize(x, axis_name="tp").values,
    "FP8 scale of quantize_params": lambda x: (
        ub.fp8.quantize_params([x], axis_name="tp")[0].values
    ),
}


@covering(name=CALLS_OVER_AN_AXIS, is_jitted=[False, True], check_vma=[True, False])
def test_axis_of_vmap_that_hides_a_mesh_axis(name, is_jitted, check_vma):
    call = CALLS_OVER_AN_AXIS[name]
    mapped = jax.vmap(jax.jit(call) if is_jitted else call, axis_name="tp")
    program = jax.shard_map(
        mapped,
        mesh=tp_mesh(4),
        in_specs=P("tp"),
        out_specs=P("tp"),
        check_vma=check_vma,
    )
    text = f"{name}: axis_name = 'tp' is an axis of jax.vmap here, which hides the mesh"
    for num_mapped in (2, 4):  # by a rank, which has 4 peers
        with pytest.raises(ShapeContractError, match=re.escape(text)):
            jax.eval_shape(program, zeros(4 * num_mapped, 4, 8))


@pytest.mark.parametrize(
    "call", [CALLS_OVER_AN_AXIS["all_gather_matmul"], CALLS_OVER_AN_AXIS["all_reduce"]]
)
def test_hidden_axis_of_a_jitted_plain_call(call, monkeypatch):
    """The forward would communicate over the axis of vmap, the backward would not."""
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    # jit caches `call` by its identity, with the method of the other test.
    mapped = jax.vmap(jax.jit(lambda x: call(x)), axis_name="tp")
    gradient = jax.grad(lambda x: jnp.sum(mapped(x)))
    on = {"mesh": tp_mesh(4), "in_specs": P("tp"), "out_specs": P("tp")}
    program = jax.shard_map(gradient, **on, check_vma=False)
    with pytest.raises(ShapeContractError, match="which hides the mesh axis"):
        jax.eval_shape(program, zeros(16, 4, 8))


def test_kernel_sharded_along_the_wrong_dimension():
    refuses(
        ShapeContractError,
        r"sharded along its first dimension.*in_specs P\(None, axis_name\)",
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
        zeros(8, 24),
        zeros(6, 8),
    )


@pytest.mark.parametrize("op", [ub.matmul_reduce_scatter, ub.matmul_all_reduce])
def test_kernel_or_features_that_are_not_sharded(op):
    refuses(
        ShapeContractError,
        r"not sharded along its first dimension.*in_specs P\(axis_name, None\)",
        lambda x, w: op(x, w, axis_name="tp"),
        zeros(8, 6),
        zeros(24, 8),
    )
    refuses(
        ShapeContractError,
        r"activations are not sharded along their features.*P\(..., axis_name\)",
        lambda x, w: op(x, w, axis_name="tp"),
        zeros(8, 24),
        zeros(6, 8),
    )


def test_rows_that_do_not_divide():
    refuses(
        ShapeContractError,
        "has 10 rows .axis -2., which do not divide into 4 ranks. Pad to 12 rows",
        lambda x, w: ub.matmul_reduce_scatter(x, w, axis_name="tp"),
        zeros(10, 6),
        zeros(6, 8),
    )


def test_residual_of_another_shape():
    refuses(
        ShapeContractError,
        r"residual has shape \(8, 8\), but here it is the result's shape, \(2, 8\)",
        lambda x, w, r: ub.matmul_reduce_scatter(x, w, axis_name="tp", residual=r),
        zeros(8, 6),
        zeros(6, 8),
        zeros(8, 8),
    )


def test_no_kernels_and_biases_that_do_not_match_them():
    refuses(
        ShapeContractError,
        "w is an empty tuple. Pass at least one kernel",
        lambda x: ub.all_gather_matmul(x, (), axis_name="tp"),
        zeros(8, 6),
    )
    refuses(
        ShapeContractError,
        "bias is a tuple of 1, but w is a tuple of 2 kernels. Pass one bias for each",
        lambda x, w, b: ub.all_gather_matmul(x, (w, w), axis_name="tp", bias=(b,)),
        zeros(8, 6),
        zeros(6, 8),
        zeros(8),
    )
    refuses(
        ShapeContractError,
        "bias is a list, but w is a tuple of 2 kernels",
        lambda x, w, b: ub.all_gather_matmul(x, (w, w), axis_name="tp", bias=[b, b]),
        zeros(8, 6),
        zeros(6, 8),
        zeros(8),
    )
    refuses(
        ShapeContractError,
        "bias is a tuple of 1, but w is one kernel",
        lambda x, w, b: ub.all_gather_matmul(x, w, axis_name="tp", bias=(b,)),
        zeros(8, 6),
        zeros(6, 8),
        zeros(8),
    )


@pytest.mark.parametrize("axis_name", [None, (4,)])
def test_axis_name_that_is_no_name(axis_name):
    message = rf"axis_name = {re.escape(str(axis_name))} is not the name of a mesh axis"
    refuses(
        ShapeContractError,
        f"all_reduce: {message}",
        lambda x: ub.all_reduce(x, axis_name=axis_name),
        zeros(8),
    )
    refuses(
        ShapeContractError,
        f"AllReduce: {message}",
        lambda x: ops.Sequential(ops.AllReduce(axis_name))(({},), x),
        zeros(8),
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ub.all_reduce(None, axis_name="tp"), "all_reduce: x is of type N"),
        (lambda x: ub.dgrad_add(x, x, None), "dgrad_add: residual is of type NoneType"),
        (lambda x: ub.wgrad_accumulate(x, None, x), "wgrad_accumulate: dy is of type"),
        (lambda x: ub.wgrad_accumulate(x, x, None), "main_grad is of type NoneType"),
        (
            lambda x: ub.matmul_reduce_scatter(x, x, residual=0.0, axis_name="tp"),
            r"residual is of type float, but the op takes an array\. Pass one\.",
        ),
    ],
)
def test_an_operand_that_is_no_array_is_named(call, text):
    refuses(ShapeContractError, text, call, zeros(8, 8))


def manual_over_tp(op, mesh, **options):
    """Runs `op` and its gradients on operands of ones in a shard_map over "tp" only."""
    specs = {
        "all_gather_matmul": (P("tp"), P(None, "tp"), P(None, "tp")),
        "matmul_reduce_scatter": (P(None, "tp"), P("tp"), P("tp")),
        "matmul_all_reduce": (P(None, "tp"), P("tp"), P()),
        "linear": (P("tp"), P(), P("tp")),
    }
    x, w, y = specs[op.__name__]
    if op is not ub.linear:
        options["axis_name"] = "tp"
    return jax.jit(
        jax.shard_map(
            lambda x, w: op(x, w, **options),
            mesh=mesh,
            in_specs=(x, w),
            out_specs=y,
            axis_names={"tp"},
        )
    )


@pytest.mark.parametrize("op", [*GEMMS, ub.linear])
def test_axis_that_is_left_to_xla(op):
    mesh, operands = dp_tp_mesh(2, 2), (jnp.ones((8, 6)), jnp.ones((6, 8)))
    message = (
        rf"{op.__name__}: the mesh axes \['dp'\] are left to XLA.*Call it inside "
        "jax.shard_map over all mesh axes .leave out axis_names=., or pass "
        'method="xla"'
    )
    mapped = manual_over_tp(op, mesh)
    with pytest.raises(UnsupportedOverlapError, match=message):
        mapped.trace(*operands)
    with pytest.raises(UnsupportedOverlapError, match=message):
        jax.eval_shape(jax.grad(lambda x, w: mapped(x, w).sum()), *operands)
    y = manual_over_tp(op, mesh, method="xla")(*operands)
    assert np.array_equal(y, np.full((8, 8), 6))


@pytest.mark.parametrize("op", [*GEMMS, ub.linear])
def test_axis_of_one_device_may_be_left_to_xla(op):
    mapped = manual_over_tp(op, dp_tp_mesh(1, 4), method="direct")
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
    assert np.array_equal(mapped(x, w), np.full((8, 8), 8))


def test_local_call_on_a_sharded_array_outside_shard_map():
    x = jax.device_put(zeros(8, 6), NamedSharding(tp_mesh(2), P("tp")))
    message = "linear: the program runs on 2 devices, but the call is not inside"
    with pytest.raises(UnsupportedOverlapError, match=message):
        jax.jit(ub.linear)(x, zeros(6, 8))
    assert ub.linear(x, zeros(6, 8), method="xla").shape == (8, 8)


def lowered_for(platform, method, mesh):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", method=method, ub_name="qkv")

    specs = (P("tp"), P(None, "tp"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    shapes = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((8, 6), (6, 8)), specs, strict=True)
    )
    traced = jax.jit(mapped).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_another_platform_falls_back_where_the_choice_was_automatic():
    text = lowered_for("rocm", "auto", tp_mesh(4))
    assert "jax_ub$" not in text
    assert "all_gather" in text
    fallback = ub.fallbacks()[-1]
    assert fallback.label == "all_gather_matmul (ub_name 'qkv')"
    assert fallback.reason == "no engine for rocm"


def test_another_platform_refuses_a_method_that_was_named():
    message = r'method "direct" cannot run: no engine for rocm. Pass method="auto"'
    with pytest.raises(UnsupportedOverlapError, match=message):
        lowered_for("rocm", "direct", tp_mesh(4))


def test_an_abstract_mesh_of_one_process_needs_no_devices():
    assert "jax_ub$" in lowered_for("cpu", "direct", tp_mesh(4).abstract_mesh)


def test_an_abstract_mesh_of_several_processes_names_no_devices(monkeypatch):
    mesh = tp_mesh(4).abstract_mesh
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedOverlapError, match="abstract mesh, which names no"):
        lowered_for("cpu", "direct", mesh)
    assert "jax_ub$" not in lowered_for("cpu", "auto", mesh)
    assert "abstract mesh" in ub.fallbacks()[-1].reason


def test_ranks_in_processes_that_are_not_connected_fall_back(monkeypatch):
    why = "its ranks are in processes [0, 1], which are not connected"
    monkeypatch.setattr(communicators, "reason", lambda *groups: why)
    text = r"all_gather_matmul .* runs as plain jax.lax: its .* See docs/processes\.md"
    with pytest.warns(UserWarning, match=text):
        assert "jax_ub$" not in lowered_for("cpu", "auto", tp_mesh(4))
    assert ub.fallbacks()[-1].reason == why
    assert "jax_ub$" not in lowered_for("cpu", None, tp_mesh(4))  # warns once
    with pytest.raises(UnsupportedOverlapError, match="which are not connected"):
        lowered_for("cpu", Method.RING_EXCHANGE, tp_mesh(4))


def test_a_result_dtype_that_is_none_is_refused():
    def call(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", out_dtype="flot")

    message = "all_gather_matmul: out_dtype = 'flot' is not a result the op has. Use"
    refuses(ShapeContractError, message, call, zeros(8, 6), zeros(6, 8))


def test_an_axis_that_is_named_twice_is_refused():
    def call(x, w):
        return ub.matmul_all_reduce(x, w, axis_name=("tp", "tp"))

    message = r"matmul_all_reduce: axis_name = \('tp', 'tp'\) names a mesh axis twice"
    refuses(ShapeContractError, message, call, zeros(8, 6), zeros(6, 8))


def test_mesh_smaller_than_the_specs_ask_for_is_refused_by_jax():
    with pytest.raises(ValueError, match="divi"):
        trace(
            lambda x: ub.all_reduce(x, axis_name="tp"), np.zeros((3, 2)), specs=P("tp")
        )


def test_plain_function_of_xla_needs_no_engine():
    text = lowered_for("cpu", "xla", tp_mesh(4))
    assert "jax_ub$" not in text


def test_method_of_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    assert "jax_ub$" not in lowered_for("cpu", None, tp_mesh(4))
    assert "jax_ub$" in lowered_for("cpu", "direct", tp_mesh(4))
    monkeypatch.setenv("JAX_UB_METHOD", "xlla")
    with pytest.raises(UnknownNameError, match="JAX_UB_METHOD = 'xlla'"):
        lowered_for("cpu", None, tp_mesh(4))


def test_axis_over_a_scan_stays_manual():
    def function(x):
        return lax.scan(
            lambda x, _: (ub.all_reduce(x, axis_name="tp") / 4, None), x, length=2
        )[0]

    trace(function, zeros(8))
