"""Fused operations that are constructed by Transformer Engine's keywords."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from linears import arrays, dgrad, wgrad, wide
from operands import assert_equal, small_integers
from overlapped_models import bias_of, expected_gradients, expected_result
from programs import calls, compiled_text, on_ranks, tp_mesh
from sequences import FEATURES, ROWS, names, overlapped

from jax_ub import ops
from jax_ub._src.ops.fused_operation import FusedOperation
from jax_ub.errors import FusionError, ShapeContractError
from jax_ub.ops import fused

FUSED = [getattr(fused, name) for name in fused.__all__]


def basic(mode, name="qkv", k=8, n=8, **options):
    return ops.BasicLinear(
        k, n, tensor_parallel_mode=mode, **overlapped(name, **options)
    )


BIAS, SCATTER, GELU = ops.Bias(8), ops.ReduceScatter(), ops.GELU()
OUT, OUT_IN_PLACE = ops.MakeExtraOutput(), ops.MakeExtraOutput(in_place=True)
ADD = ops.AddExtraInput(in_place=True)
SCALE, NORM = ops.ConstantScale(2), ops.RMSNorm(8)
LOCAL, COLUMN, ROW = basic(None, None), basic("column"), basic("row")
UBF, UBB = fused.UserbuffersForwardLinear, fused.UserbuffersBackwardLinear

BY_KEYWORD = [
    (UBF, {"linear": COLUMN, "bias": BIAS}),
    (UBF, {"linear": ROW, "bias": None, "reduce_scatter": None}),
    (UBF, {"linear": basic(None), "bias": BIAS, "reduce_scatter": SCATTER}),
    (UBB, {"linear": COLUMN, "bias": BIAS, "reduce_scatter": None}),
    (UBB, {"linear": ROW}),
    (UBB, {"linear": basic(None), "reduce_scatter": SCATTER}),
    (fused.ForwardLinearBiasActivation, {"linear": LOCAL, "bias": BIAS}),
    (
        fused.ForwardLinearBiasActivation,
        {"linear": LOCAL, "bias": BIAS, "activation": GELU},
    ),
    (fused.ForwardLinearBiasAdd, {"linear": LOCAL, "bias": None, "add": ADD}),
    (fused.ForwardLinearBiasAdd, {"linear": ROW, "bias": BIAS, "add": ADD}),
    (fused.ForwardLinearScaleAdd, {"linear": LOCAL, "scale": SCALE, "add": ADD}),
    (fused.BackwardLinearAdd, {"backward_add": OUT_IN_PLACE, "linear": LOCAL}),
    (fused.BackwardLinearAdd, {"backward_add": OUT_IN_PLACE, "linear": ROW}),
    (fused.BackwardLinearScale, {"linear": LOCAL, "scale": SCALE}),
    (fused.BackwardActivationBias, {"bias": BIAS, "activation": GELU}),
    (fused.BackwardAddRMSNorm, {"add": OUT, "rmsnorm": NORM}),
]


@pytest.mark.parametrize(("kind", "parts"), BY_KEYWORD)
def test_keywords_construct_the_same_operation_as_the_fusion(kind, parts):
    made = kind(**parts)
    window = tuple(part for part in parts.values() if part is not None)
    assert made.basic_ops == window
    fuser = ops.OperationFuser(window)
    scanned = fuser.forward_ops if made.overrides("forward") else fuser.backward_ops
    assert scanned == [made]
    fields = [getattr(made, name) for name in parts]
    assert kind([op for op in fields if op is not None]) == made


@pytest.mark.parametrize(("kind", "parts"), BY_KEYWORD)
def test_dataclasses_replace_constructs_an_equal_operation(kind, parts):
    made = kind(**parts)
    assert dataclasses.replace(made) == made


def test_dataclasses_replace_changes_an_operation():
    made = fused.ForwardLinearBiasAdd(linear=ROW, bias=BIAS, add=ADD)
    linear = basic("row", "proj")
    changed = dataclasses.replace(made, basic_ops=None, linear=linear)
    assert changed == fused.ForwardLinearBiasAdd(linear=linear, bias=BIAS, add=ADD)
    with pytest.raises(ShapeContractError, match="basic_ops and linear are given"):
        dataclasses.replace(made, linear=linear)


def test_a_fused_operation_in_the_window_is_replaced_by_its_basic_operations():
    overlapped = UBF(linear=ROW)
    made = fused.ForwardLinearBiasAdd((overlapped, BIAS, ADD))
    assert made == fused.ForwardLinearBiasAdd(linear=overlapped, bias=BIAS, add=ADD)
    assert made.basic_ops == (ROW, BIAS, ADD)


@pytest.mark.parametrize("kind", FUSED)
def test_fusions_accept_unused_keywords(kind):
    direction = "forward" if "Forward" in kind.__name__ else "backward"
    scan = getattr(kind, f"fuse_{direction}_ops")
    parts = next(parts for found, parts in BY_KEYWORD if found is kind)
    window = [part for part in parts.values() if part is not None]
    # The scans of other fused operations come first in the fuser.
    before = {
        fused.ForwardLinearBiasAdd: UBF,
        fused.BackwardLinearAdd: UBB,
    }.get(kind)
    if before is not None:
        window = getattr(before, f"fuse_{direction}_ops")(window, recipe=None)
    (made,) = scan(window, recipe=None, anything="else")
    assert type(made) is kind


REFUSED = [
    (UBB, {}, r"UserbuffersBackwardLinear: linear is missing\. Pass linear=ops\.Basic"),
    (UBB, {"linear": BIAS}, r"linear = Bias\(size=8\) is a Bias, not an ops\.BasicLin"),
    (UBF, {"linear": COLUMN, "bias": SCATTER}, "is a ReduceScatter, not an ops.Bias"),
    (UBF, {"linear": basic("row", None)}, 'Pass userbuffers_options={"comm_name": "q'),
    (UBF, {"linear": basic(None)}, r"communicates nothing\. Pass reduce_scatter=ops\."),
    (UBB, {"linear": ROW, "bias": BIAS}, r"after the reduce-scatter\. Pass bias=None"),
    (
        UBB,
        {"linear": COLUMN, "reduce_scatter": SCATTER},
        r'tensor_parallel_mode = "column", but a reduce_s.* Pass reduce_scatter=N',
    ),
    (
        UBB,
        {"basic_ops": (COLUMN,), "linear": ROW},
        r"both basic_ops and linear are given, and they differ\. Pass .*ear\(linear",
    ),
    (
        UBB,
        {"basic_ops": (COLUMN,), "bias": BIAS},
        r"both basic_ops and bias are given, and they differ\. Pass .*ear\(linear",
    ),
    (UBB, {"basic_ops": COLUMN}, "basic_ops is a BasicLinear, not a tuple"),
    (UBB, {"basic_ops": (BIAS, COLUMN)}, r"has the types \(Bias, BasicLinear\), which"),
    (
        fused.BackwardLinearAdd,
        {"backward_add": OUT, "linear": LOCAL},
        r"in_place = False\. Pass backward_add=ops\.MakeExtraOutput\(in_place=True\)",
    ),
    (
        fused.BackwardLinearAdd,
        {"backward_add": OUT_IN_PLACE, "linear": COLUMN},
        'tensor_parallel_mode = "column": dx is reduced first. Leave',
    ),
    (
        fused.ForwardLinearBiasAdd,
        {"linear": basic("row", None), "add": ADD},
        'tensor_parallel_mode = "row": its result is reduced',
    ),
    (
        fused.ForwardLinearBiasAdd,
        {"linear": UBF(linear=COLUMN), "add": ADD},
        "the AG.GEMM of userbuffers adds no residual",
    ),
    (
        fused.ForwardLinearBiasAdd,
        {"linear": UBB(linear=ROW), "add": ADD},
        r"linear = .* is a UserbuffersBackwardLinear, not an ops\.BasicLinear\. Pass",
    ),
    (
        fused.ForwardLinearBiasAdd,
        {"linear": LOCAL, "add": ops.AddExtraInput()},
        r"Pass add=ops\.AddExtraInput\(in_place=True\)",
    ),
    (
        fused.ForwardLinearScaleAdd,
        {"linear": ROW, "scale": SCALE, "add": ADD},
        'tensor_parallel_mode = "row"',
    ),
    (
        fused.ForwardLinearBiasActivation,
        {"linear": ROW, "bias": BIAS},
        'tensor_parallel_mode = "row"',
    ),
    (
        fused.BackwardLinearScale,
        {"linear": COLUMN, "scale": SCALE},
        'tensor_parallel_mode = "column"',
    ),
    (fused.BackwardActivationBias, {"bias": BIAS}, "activation is missing"),
    (
        fused.BackwardAddRMSNorm,
        {"add": OUT_IN_PLACE, "rmsnorm": NORM},
        r"Pass add=ops\.MakeExtraOutput\(in_place=False\)",
    ),
]


@pytest.mark.parametrize(("kind", "parts", "message"), REFUSED)
def test_operations_that_do_not_match_are_rejected(kind, parts, message):
    with pytest.raises(ShapeContractError, match=message) as caught:
        kind(**parts)
    assert str(caught.value).startswith(f"{kind.__name__}: ")


def test_all_parts_except_the_tuple_are_keyword_only():
    for kind in FUSED:
        first, *rest = list(inspect.signature(kind).parameters.values())
        assert first.name == "basic_ops"
        assert all(part.kind is part.KEYWORD_ONLY for part in rest)


def step_of(seq, specs, x_spec, y_spec, dy):
    run = on_ranks(lambda p, x: seq(p, x), tp_mesh(4), (specs, x_spec), y_spec)

    def loss(params, x):
        y = run(params, x)
        return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@covering(kind=["column", "row", "scattered"], made=[UBF, UBB])
def test_userbuffers_linears_run_as_entries_of_a_sequential(made, kind):
    a = arrays(4)
    k, n = a.w.shape
    mode = None if kind == "scattered" else kind
    linear = basic(mode, k=k if mode else k // 4, n=n, method="direct")
    b = bias_of(kind, 4, a, small_integers)
    bias = ops.Bias(n, tensor_parallel=kind == "column")
    scatter = ops.ReduceScatter() if mode is None else None
    inside = None if mode == "row" else bias
    op = made(linear=linear, bias=inside, reduce_scatter=scatter)
    seq = ops.Sequential(ops.Sequential(op), *([] if inside else [bias]))
    kernel = {"kernel": P(None, "tp") if kind == "column" else P("tp")}
    biases = {"bias": P() if kind == "row" else P("tp")}
    window = (kernel, *([biases] if inside else []), *([{}] if scatter else []))
    specs = ((window,), *([] if inside else [biases]))
    own = [{"kernel": a.w}, *([{"bias": b}] if inside else []), *([{}] * bool(scatter))]
    params = ((tuple(own),), *([] if inside else [{"bias": b}]))
    x_spec, y_spec = (ROWS, FEATURES) if kind == "column" else (FEATURES, ROWS)
    step = step_of(seq, specs, x_spec, y_spec, a.dy)

    with ops.without_fusions():  # constructed fused operations still run
        text = compiled_text(step, params, a.x)
        (_, y), (d_params, dx) = step(params, a.x)
    found = calls(text)
    if made is UBF:
        target = "all_gather_matmul" if kind == "column" else "matmul_reduce_scatter"
        assert found[target] == 1
        assert (found["matmul"], found["wgrad"]) == (1, 1)
    else:
        target = "matmul_reduce_scatter" if kind == "column" else "all_gather_matmul"
        assert (found[target], found["wgrad"], found["matmul"]) == (1, 1, 1)
    wanted = expected_gradients(kind, 4, a)
    assert_equal(y, expected_result(kind, 4, a, b))
    assert_equal((dx, d_params[0][0][0]["kernel"]), wanted[:2])
    db = d_params[0][0][1] if inside else d_params[1]
    assert_equal(db["bias"], wanted[2])

    # The registered fusions take the other direction.
    step = step_of(seq, specs, x_spec, y_spec, a.dy)
    both = calls(compiled_text(step, params, a.x))
    assert "matmul" not in both
    assert {"all_gather_matmul", "matmul_reduce_scatter", "wgrad"} <= both.keys()


LOCAL_CALLS = {"matmul": 1, "wgrad": 1}


@pytest.mark.parametrize(("mode", "name"), [(None, None), ("row", "proj")])
def test_backward_linear_add_runs_as_an_entry_of_a_fuser(mode, name):
    a = arrays(4)
    linear = basic(mode, name, *a.w.shape, method="direct")
    op = fused.BackwardLinearAdd(backward_add=OUT_IN_PLACE, linear=linear)
    fuser = ops.OperationFuser([op])
    run = lambda p, x: fuser((({}, p),), x)  # noqa: E731
    if mode == "row":
        specs = {"kernel": P("tp")}, FEATURES
        run = on_ranks(run, tp_mesh(4), specs, (ROWS, FEATURES))

    def loss(params, x):
        y, extra = run(params, x)
        return jnp.sum(y * a.dy) + jnp.sum(extra * a.residual)

    step = jax.jit(jax.grad(loss, (0, 1)))
    with ops.without_fusions():
        assert names(fuser.forward_ops) == ["MakeExtraOutput", "BasicLinear"]
        assert fuser.backward_ops == [op]
        found = calls(compiled_text(step, {"kernel": a.w}, a.x))
        d_params, dx = step({"kernel": a.w}, a.x)
    wanted = {"all_gather_matmul": 1, "wgrad": 1}
    assert found == (wanted if mode == "row" else LOCAL_CALLS)
    assert_equal(dx, dgrad(a) + wide(a.residual))
    assert_equal(d_params["kernel"], wgrad(a))


LOCAL_CASES = [
    [
        fused.ForwardLinearBiasActivation(
            linear=ops.BasicLinear(6, 8), bias=BIAS, activation=ops.ReLU()
        )
    ],
    [fused.ForwardLinearBiasActivation(linear=ops.BasicLinear(6, 8), bias=None)],
    [fused.ForwardLinearBiasAdd(linear=ops.BasicLinear(6, 8), bias=BIAS, add=ADD)],
    [fused.ForwardLinearScaleAdd(linear=ops.BasicLinear(6, 8), scale=SCALE, add=ADD)],
    [fused.BackwardLinearScale(linear=ops.BasicLinear(6, 8), scale=SCALE)],
    [
        ops.BasicLinear(6, 8),
        fused.BackwardActivationBias(bias=BIAS, activation=ops.ReLU()),
    ],
    [ops.BasicLinear(6, 8), fused.BackwardAddRMSNorm(add=OUT, rmsnorm=NORM)],
]


@pytest.mark.parametrize("found", LOCAL_CASES)
def test_local_fused_operations_equal_their_basic_operations(found):
    seq = ops.Sequential(*found)
    plain = ops.Sequential(*seq.basic_ops)
    params = seq.init(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(seq.specs())
    flat = seq.split(params)
    x = jax.random.normal(jax.random.key(1), (4, 6))
    fuser = ops.OperationFuser([seq])
    extra = [jnp.ones((4, 8))] * len(fuser.extra_edges.from_outside)

    def loss(run):
        def total(params, x):
            found = run(params, x, *extra)
            return sum(jnp.sum(y**2) for y in jax.tree.leaves(found))

        return jax.jit(jax.value_and_grad(total, (0, 1)))

    with ops.without_fusions():
        kept = [op for op in found if isinstance(op, FusedOperation)]
        assert set(kept) <= {*fuser.forward_ops, *fuser.backward_ops}
        value, (d_params, dx) = loss(seq)(params, x)
        expected, (d_flat, d_x) = loss(plain)(flat, x)
    close = lambda a, b: jnp.allclose(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
    assert close(value, expected)
    assert close(dx, d_x)
    assert all(jax.tree.leaves(jax.tree.map(close, seq.split(d_params), d_flat)))


def test_a_channel_inside_a_constructed_window_is_rejected():
    window = (
        OUT.with_extra_output_channel(0, "residual"),
        ADD.with_extra_input_channel(0, "residual"),
    )

    class Residual(FusedOperation):
        def forward(self, params, x, extra_inputs, saves):
            return super().forward(params, x, extra_inputs, saves)

    fuser = ops.OperationFuser([Residual(window)])
    assert names(fuser.backward_ops) == ["MakeExtraOutput", "AddExtraInput"]
    with pytest.raises(
        FusionError, match="the list fuses the producer and a reader of a"
    ):
        _ = fuser.forward_ops


def test_parameters_of_a_fused_operation_are_a_tuple():
    op = fused.BackwardLinearScale(linear=ops.BasicLinear(6, 8), scale=SCALE)
    message = "BackwardLinearScale: params is of type dict, but there are 2 operations"
    with pytest.raises(ShapeContractError, match=message):
        ops.Sequential(op)(({"kernel": jnp.ones((6, 8))},), jnp.ones((4, 6)))
