"""Overlapped linears, forward and backward: Transformer Engine's acceptance matrix.

Its cases are bias x mode x frozen kernel; here in three dtypes, for any number of
ranks, exact on small integers and within rounding on others.
"""

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from linears import arrays, dgrad, wgrad, wide
from operands import (
    DTYPES,
    RANK_COUNTS,
    assert_close,
    assert_equal,
    normal,
    small_integers,
)
from overlapped_models import (
    KINDS,
    bias_of,
    expected_gradients,
    expected_result,
    model,
    params_of,
    weighted,
)
from programs import calls, collectives, compiled_text, tp_mesh
from sequences import names

import jax_ub as ub
from jax_ub import ops


def step_of(m, a, **options):
    """Returns a jitted step: ((loss, y), (gradients of params, gradient of x))."""
    layer = m.on_ranks(**options)
    return jax.jit(
        jax.value_and_grad(weighted(layer, a.dy), argnums=(0, 1), has_aux=True)
    )


def results(kind, num_ranks, a, make=small_integers, *, bias=True, **options):
    m = model(kind, num_ranks, a, bias=bias, **options)
    b = bias_of(kind, num_ranks, a, make)
    (_, y), (d_params, dx) = step_of(m, a)(params_of(m, a, b), a.x)
    db = d_params[1]["bias"] if bias else None
    return y, dx, d_params[0]["kernel"], db, b


@covering(kind=KINDS, num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_layers_are_exact_for_every_number_of_ranks(kind, num_ranks, dtype):
    a = arrays(num_ranks, dtype)
    y, dx, dw, db, b = results(kind, num_ranks, a)
    assert_equal(y, expected_result(kind, num_ranks, a, b).astype(dtype))
    wanted = expected_gradients(kind, num_ranks, a)
    assert_equal((dx, dw), (wanted[0].astype(dtype), wanted[1].astype(dtype)))
    assert_equal(db, wanted[2])


@covering(
    kind=KINDS,
    method=["direct", "ring_exchange", "pipeline", "external"],
    bias=[True, False],
)
def test_layers_are_exact_for_every_method(kind, bias, method):
    a = arrays(4)
    y, dx, dw, db, b = results(kind, 4, a, bias=bias, method=method)
    b = b if bias else np.zeros(b.shape, np.float32)
    assert_equal(y, expected_result(kind, 4, a, b))
    wanted = expected_gradients(kind, 4, a)
    assert_equal((dx, dw), wanted[:2])
    assert_equal(db, wanted[2] if bias else None)


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, DTYPES, strict=True)))
def test_layers_are_close_on_normal_values(kind, dtype):
    a = arrays(4, dtype, normal)
    y, dx, dw, db, b = results(kind, 4, a, normal)
    k, n = a.w.shape
    assert_close(y, expected_result(kind, 4, a, b), k)
    wanted = expected_gradients(kind, 4, a)
    assert_close(dx, wanted[0], n)
    assert_close(dw, wanted[1], 24)
    assert_close(db, wanted[2], 24)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_have_different_values(kind):
    """The ranks' values differ by orders of magnitude, so that none is rounded away."""
    num_ranks = 4
    a = arrays(num_ranks, make=normal)
    sizes = np.float32(8) ** -np.arange(num_ranks, dtype=np.float32)
    rows = np.repeat(sizes, a.x.shape[-2] // num_ranks)[:, None]
    columns = np.repeat(sizes, a.x.shape[-1] // num_ranks)
    x = a.x * (rows if kind == "column" else columns)
    scaled = type(a)(jnp.asarray(x), a.w, a.dy, a.main_grad, a.residual)
    y, dx, dw, _, b = results(kind, num_ranks, scaled, normal, bias=False)
    expected = expected_result(kind, num_ranks, scaled, np.zeros(b.shape, np.float32))
    factor = 1 / rows if kind == "column" else 1.0
    assert_close(y * factor, expected * factor, 20)
    assert_close(dx, dgrad(scaled), 28)
    factor = 1.0 if kind == "column" else 1 / columns[:, None]
    assert_close(dw * factor, wgrad(scaled) * factor, 24)


@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [("column", True), ("row", False), ("scattered", True), ("scattered", False)],
)
def test_fused_layers_equal_unfused_layers(kind, check_vma):
    a = arrays(4)
    m, b = model(kind, 4, a), bias_of(kind, 4, a, small_integers)
    found = step_of(m, a, check_vma=check_vma)(params_of(m, a, b), a.x)
    with ops.without_fusions():
        assert names(ops.OperationFuser([m.seq]).forward_ops) == names(m.seq.basic_ops)
        expected = step_of(m, a, check_vma=check_vma)(params_of(m, a, b), a.x)
    assert_equal(found, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_bias_before_a_reduce_scatter_is_added_once_per_rank(check_vma):
    a = arrays(4)
    m = model("scattered", 4, a)
    m = type(m)(m.kind, 4, m.seq, (m.specs[0], {"bias": P()}, {}), m.x, m.y)
    b = small_integers(5, (28,))
    step = step_of(m, a, check_vma=check_vma)
    (_, y), (d_params, _) = step(params_of(m, a, b), a.x)
    assert_equal(y, wide(a.x) @ wide(a.w) + 4 * wide(b))
    assert_equal(d_params[1]["bias"], 4 * expected_gradients("row", 4, a)[2])


CALLS = {
    "column": {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "wgrad": 1},
    "row": {"matmul_reduce_scatter": 1, "all_gather_matmul": 1, "wgrad": 1},
    # The two small all-reduces are of the biases and of their gradients.
    "scattered": {
        "matmul_reduce_scatter": 1,
        "all_gather_matmul": 1,
        "wgrad": 1,
        "all_reduce": 2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_one_call_per_gemm(kind):
    a = arrays(4)
    m = model(kind, 4, a, method="direct")
    b = bias_of(kind, 4, a, small_integers)
    text = compiled_text(step_of(m, a), params_of(m, a, b), a.x)
    assert calls(text) == CALLS[kind]
    # The loss, and the bias gradient of a row-parallel layer.
    assert sum(collectives(text).values()) <= 2
    assert not collectives(text).keys() - {"all-reduce"}
    with ops.without_fusions():
        text = compiled_text(step_of(m, a), params_of(m, a, b), a.x)
    # Without fusion, each GEMM has a separate all-gather or reduce-scatter.
    alone = calls(text)
    assert alone["matmul"] == 2
    assert alone["all_gather"] + alone["reduce_scatter"] >= 2


@covering(kind=KINDS, method=[None, "ring_exchange"])
def test_frozen_kernel_costs_no_wgrad(kind, method):
    a = arrays(4)
    m = model(kind, 4, a, bias=False, method=method)
    layer, params = m.on_ranks(), params_of(m, a, None)
    loss = weighted(layer, a.dy)
    step = jax.jit(jax.value_and_grad(lambda x: loss(params, x)[0]))
    found = calls(compiled_text(step, a.x))
    assert found == {k: v for k, v in CALLS["row"].items() if k != "wgrad"}
    assert_equal(step(a.x)[1], dgrad(a))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_input_costs_no_dgrad(kind):
    a = arrays(4)
    m = model(kind, 4, a, bias=False, method="direct")
    layer, params = m.on_ranks(), params_of(m, a, None)
    loss = weighted(layer, a.dy)
    step = jax.jit(jax.value_and_grad(lambda p: loss(p, a.x)[0]))
    found = calls(compiled_text(step, params))
    forward = "all_gather_matmul" if kind == "column" else "matmul_reduce_scatter"
    assert found == {forward: 1, "wgrad": 1}
    assert_equal(step(params)[1][0]["kernel"], wgrad(a))


@pytest.mark.parametrize(
    ("kind", "dtype", "method"),
    [
        ("column", "bfloat16", None),
        ("column", "float32", "pipeline"),
        ("row", "bfloat16", None),
        ("scattered", "float32", "ring_exchange"),
    ],
)
def test_gradient_is_added_to_main_grad(kind, dtype, method):
    a = arrays(4, dtype)
    m = model(kind, 4, a, accumulate_into_main_grad=True, method=method)
    b = bias_of(kind, 4, a, small_integers)
    _, (d_params, dx) = step_of(m, a)(params_of(m, a, b), a.x)
    assert_equal(d_params[0]["main_grad"], wide(a.main_grad) + wgrad(a))
    assert_equal(d_params[0]["kernel"], np.zeros(a.w.shape, dtype))
    assert_equal(dx, dgrad(a).astype(dtype))


@pytest.mark.parametrize(
    ("kind", "batch"), list(zip(KINDS, [(), (2, 1, 2), (3,)], strict=True))
)
def test_layers_take_any_batch_axes(kind, batch):
    a = arrays(2, batch=batch)
    m = model(kind, 2, a)
    leading = [None] * len(batch)
    rows, features = P(*leading, "tp"), P(*leading, None, "tp")
    x, y = (rows, features) if kind == "column" else (features, rows)
    m = type(m)(m.kind, 2, m.seq, m.specs, x, y)
    b = bias_of(kind, 2, a, small_integers)
    (_, found), (d_params, dx) = step_of(m, a)(params_of(m, a, b), a.x)
    wanted = expected_gradients(kind, 2, a)
    assert_equal(found, expected_result(kind, 2, a, b))
    assert_equal((dx, d_params[0]["kernel"]), wanted[:2])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_repeated_steps_are_bitwise_equal(kind):
    a = arrays(8, "bfloat16", normal)
    m, b = model(kind, 8, a), bias_of(kind, 8, a, normal)
    step, params = step_of(m, a), params_of(m, a, b)
    first = step(params, a.x)
    for _ in range(5):
        assert_equal(step(params, a.x), first)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_computation_have_separate_dtypes(kind):
    a = arrays(4)
    m = model(kind, 4, a, dtype="bfloat16")
    b = bias_of(kind, 4, a, small_integers)
    (_, y), (d_params, dx) = step_of(m, a)(params_of(m, a, b), a.x)
    assert y.dtype == "bfloat16"
    # A gradient has the dtype of its operand. The kernel's gradient is never rounded to
    # the computation's dtype.
    assert_equal(d_params[0]["kernel"], wgrad(a))
    assert_equal(dx, wide(dgrad(a).astype("bfloat16")))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Transformer Engine's default: bulk.
        ({}, {"bulk_all_gather": 1, "bulk_reduce_scatter": 1}),
        (
            {"qkv_dgrad": {"method": "ring_exchange"}},
            {"matmul_reduce_scatter": 1, "wgrad": 1, "all_gather": 1},
        ),
        (
            {"qkv_dgrad": {"method": "direct"}},
            {"matmul_reduce_scatter": 1, "wgrad": 1},
        ),
    ],
)
def test_the_configured_method_selects_the_calls_of_a_column_backward(config, expected):
    if layouts.LAYOUT is not None:
        pytest.skip("the names of this job are configured for all of its tests")
    a = arrays(4)
    shape = (a.x.shape[0] * a.x.shape[1], max(a.w.shape))
    ub.initialize_ub(shape, 4, dtype=jnp.float32, ub_cfgs=config, mesh=tp_mesh(4))
    m, b = model("column", 4, a), bias_of("column", 4, a, small_integers)
    step, params = step_of(m, a), params_of(m, a, b)
    assert calls(compiled_text(step, params, a.x)) == {
        "all_gather_matmul": 1,
        **expected,
    }
    (_, y), (d_params, dx) = step(params, a.x)
    wanted = expected_gradients("column", 4, a)
    assert_equal(y, expected_result("column", 4, a, b))
    assert_equal((dx, d_params[0]["kernel"]), wanted[:2])


def test_consecutive_all_gathers_of_one_name_under_remat():
    """Three blocks share two names, and each block runs its forward pass twice."""
    p, blocks = 4, 3
    a = arrays(p)
    k, n = a.w.shape

    def linear(mode, k, n, name):
        return ops.BasicLinear(
            k,
            n,
            tensor_parallel_mode=mode,
            sequence_parallel=True,
            userbuffers_options={"comm_name": name},
            method="ring_exchange",
        )

    block = ops.Sequential(linear("column", k, n, "qkv"), linear("row", n, k, "proj"))
    ws = small_integers(6, (blocks, k, n)), small_integers(7, (blocks, n, k))

    def stacked(ws, x):
        def one(x, w):
            params = ({"kernel": w[0]}, {"kernel": w[1]})
            return jax.checkpoint(block)(params, x) % 3, None

        return jax.lax.scan(one, x, ws)[0]

    def plain(ws, x):
        for w1, w2 in zip(*ws, strict=True):
            x = (x @ w1) @ w2 % 3
        return x

    specs = ((P(None, None, "tp"), P(None, "tp")), P(None, "tp"))
    run = jax.shard_map(stacked, mesh=tp_mesh(p), in_specs=specs, out_specs=specs[1])

    def loss(function):
        return lambda ws, x: jnp.sum(function(ws, x) * a.residual)

    found = jax.jit(jax.value_and_grad(loss(run), (0, 1)))(ws, a.x)
    assert_equal(found, jax.value_and_grad(loss(plain), (0, 1))(ws, a.x))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_overlap_without_sequence_parallelism_is_rejected(kind):
    a = arrays(2)
    m = model(kind, 2, a, sequence_parallel=False)
    message = "sequence_parallel = False, but only all-gathers and reduce-scatters"
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=message):
        jax.eval_shape(m.on_ranks(), params_of(m, a, a.w[0]), a.x)


def test_kernel_with_a_wrong_shape_is_rejected():
    a = arrays(2)
    m = model("column", 2, a, bias=False)
    message = r"kernel has shape \(14, 5\), but here it is this rank's shard"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.eval_shape(m.on_ranks(), ({"kernel": a.w.T},), a.x)


def test_a_new_configuration_retraces_the_program(monkeypatch):
    if layouts.LAYOUT is not None:
        pytest.skip("the names of this job are configured for all of its tests")
    a = arrays(4)
    m, b = model("column", 4, a), bias_of("column", 4, a, small_integers)
    shape = (a.x.shape[0] * a.x.shape[1], max(a.w.shape))
    for method, wanted in (("bulk", "bulk_all_gather"), ("direct", "wgrad")):
        cfgs = {"qkv_dgrad": {"method": method}}
        ub.initialize_ub(shape, 4, dtype=jnp.float32, ub_cfgs=cfgs, mesh=tp_mesh(4))
        text = compiled_text(step_of(m, a), params_of(m, a, b), a.x)
        assert wanted in calls(text)
        ub.destroy_ub()
    assert "bulk_all_gather" not in calls(text)
    assert calls(compiled_text(step_of(m, a), params_of(m, a, b), a.x))
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    assert not calls(compiled_text(step_of(m, a), params_of(m, a, b), a.x))
