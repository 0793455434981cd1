"""Tests `ub.explain` of functions, forward and backward, with and without jax_ub."""

import functools

import jax
import jax.numpy as jnp
import pytest
from covering import nightly
from flax import linen, nnx
from jax import P
from jax.sharding import AxisType, NamedSharding
from overlapped_mlp import NUM_RANKS, SPECS, mlp, operands
from programs import dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.lowering_log import recording
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.runtime import tuned_file
from jax_ub._src.runtime.tuned_file import TunedKey, environment
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.sharded_linear import sharded_linear
from jax_ub._src.tools.trace.traces import Trace
from jax_ub.errors import TraceError
from jax_ub.flax import Linear

SEQUENTIAL = "communicates before or after the GEMM"


def test_calls_of_jax_ub_are_overlapped():
    found = ub.explain(mlp(), *operands())
    assert str(found).startswith("layers: 2 of 2 overlapped\n")
    assert found.overlapped
    up, down = found.rows
    assert (up.scope, up.op, up.method) == ("up", "all_gather_matmul", "direct")
    assert (down.scope, down.op) == ("matmul_reduce_scatter", "matmul_reduce_scatter")
    assert up.moved_bytes == 3 * 16 * 16 * 4
    assert up.predicted_s > 0
    assert up.measured_exposed_s is None


def test_a_call_without_a_name_is_shown_by_its_name_scopes():
    layers = [Linear(16, 16, parallel="column", rngs=nnx.Rngs(i)) for i in range(2)]

    def model(layers, x):
        for scope, layer in zip(("up", "gate"), layers, strict=True):
            with jax.named_scope("block"), jax.named_scope(scope):
                x = x + layer(x).sum()
        return x.sum()

    with jax.set_mesh(tp_mesh(NUM_RANKS)):
        x = jnp.ones((NUM_RANKS, 16))
        forward = ub.explain(model, layers, x)
        gradient = ub.explain(jax.grad(jax.checkpoint(model)), layers, x)
    assert [row.scope for row in forward.rows] == ["block/up, block/gate"]
    scopes = {scope for row in gradient.rows for scope in row.scope.split(", ")}
    assert scopes == {"block/up", "block/gate"}


def test_a_collective_without_a_gemm_does_not_count():
    def layer(x, w):
        y = ub.matmul_reduce_scatter(x, w, axis_name="tp")
        return ub.all_reduce(y, axis_name="tp")

    specs = P(None, "tp"), P("tp")
    function = on_ranks(layer, tp_mesh(2), specs, P())
    found = ub.explain(function, jnp.ones((8, 32)), jnp.ones((32, 16)))
    assert [row.op for row in found.rows] == ["matmul_reduce_scatter", "all_reduce"]
    assert [row.is_collective for row in found.rows] == [False, True]
    title, *_, last, _ = str(found).splitlines()
    assert title == "layer: 1 of 1 overlapped"
    assert "no GEMM" in last


def test_the_collective_for_a_scale_is_left_out():
    recipe = ub.fp8.Float8CurrentScaling()

    def layer(x, w):
        x = ub.quantize(x, axis_name="tp").dequantize("float32")
        return ub.all_gather_matmul(x, w, axis_name="tp", fp8=recipe)

    specs = P("tp"), P(None, "tp")
    function = on_ranks(layer, tp_mesh(2), specs, P(None, "tp"))
    found = ub.explain(function, jnp.ones((8, 32)), jnp.ones((32, 16)))
    assert [row.op for row in found.rows] == ["all_gather_matmul"]


def test_outer_recording_continues_after_an_inner_one():
    with recording() as outer:
        with recording() as inner:
            pass
        mlp().lower(*operands())
    assert len(outer) == 2
    assert not inner


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.BULK])
def test_every_method_is_explained_forward_and_backward(method):
    def loss(*args):
        return mlp(method)(*args).sum()

    found = ub.explain(jax.grad(loss, argnums=(0, 1, 2)), *operands())
    reasons = {
        Method.XLA: {'method = "xla" (given)'},
        # The gradients of kernels reuse the gathered rows.
        Method.EXTERNAL: {"", 'method = "external" (given) ' + SEQUENTIAL},
    }
    assert {row.reason for row in found.rows} == reasons.get(method, {""})
    assert found.overlapped is (method not in reasons)
    assert all(row.overlapped is (not row.reason) for row in found.rows)
    assert "up" in {row.scope for row in found.rows}


@pytest.mark.parametrize("recipe", ["RowwiseScaling", *nightly("Float8CurrentScaling")])
def test_bulk_gradients_of_fp8_operands_are_explained(recipe):
    def layer(x, w):
        fp8 = getattr(ub.fp8, recipe)()
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv", fp8=fp8)

    mesh = tp_mesh(NUM_RANKS)
    run = on_ranks(layer, mesh, SPECS[:2], P(None, "tp"))
    ub.initialize_ub([64, 16], NUM_RANKS, mesh=mesh)
    try:
        gradient = jax.grad(lambda x, w: run(x, w).sum(), argnums=(0, 1))
        found = ub.explain(gradient, *operands()[:2])
    finally:
        ub.destroy_ub()
    sent = {row.op: row.moved_bytes for row in found.rows if "bulk" in row.op}
    elements = 3 * 16 * 16  # partial sums of FP8 operands are predicted in bf16
    assert sent == {"bulk_all_gather": elements, "bulk_reduce_scatter": 2 * elements}


def test_external_from_the_environment_is_not_overlapped(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "external")
    reasons = {row.reason for row in ub.explain(mlp(), *operands()).rows}
    assert reasons == {f'method = "external" (from JAX_UB_METHOD) {SEQUENTIAL}'}


def test_external_from_a_tuned_table_is_not_overlapped(tmp_path, monkeypatch):
    case = TunedKey("matmul_reduce_scatter", NUM_RANKS, 64, 32, 16, "float32")
    tuned = {environment(): {case: (MethodChoice(Method.EXTERNAL), {})}}
    tuned_file.write(tmp_path / "t.json", tuned)
    monkeypatch.setenv("JAX_UB_TUNED", str(tmp_path / "t.json"))
    found = ub.explain(mlp(), *operands())
    reason = f'method = "external" (the fastest by a tuned table) {SEQUENTIAL}'
    assert [row.reason for row in found.rows] == ["", reason]
    assert not found.overlapped


def test_dtype_of_the_multiplied_arrays_is_shown():
    def layer(x, w):
        return ub.all_gather_matmul(
            x, w, axis_name="tp", fp8=ub.fp8.Float8CurrentScaling()
        )

    x, w, _ = operands()
    run = on_ranks(
        jax.grad(lambda x, w: (layer(x, w) ** 2).sum(), (0, 1)),
        *(tp_mesh(4), SPECS[:2], SPECS[:2]),
    )
    found = ub.explain(run, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert [(row.op, row.dtype) for row in found.rows] == [
        ("all_gather_matmul", "e4m3"),
        ("matmul_reduce_scatter", "e5m2 x e4m3"),
        ("wgrad", "e4m3 x e5m2"),
    ]
    assert " e4m3 " in str(found)
    assert found.as_json()["rows"][0]["dtype"] == "e4m3"


def test_fallback_has_its_reason(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def layers(x, up):
        return ub.all_gather_matmul(x, up, axis_name="tp")

    mesh = tp_mesh(NUM_RANKS).abstract_mesh
    run = jax.shard_map(layers, mesh=mesh, in_specs=SPECS[:2], out_specs=P(None, "tp"))
    found = ub.explain(run, *operands()[:2])
    calls = [row for row in found.rows if row.op == "all_gather_matmul"]
    assert [(row.overlapped, row.method) for row in calls] == [(False, "xla")]
    assert "it is lowered for an abstract mesh" in calls[0].reason
    assert not found.overlapped


def test_scans_multiply_counts_and_loops_are_noted():
    def scanned(x, up, down):
        def layer(x, _):
            h = ub.all_gather_matmul(x, up, axis_name="tp")
            return ub.matmul_reduce_scatter(h, down, axis_name="tp"), None

        return jax.lax.scan(layer, x, None, length=5)[0]

    def looped(x, up, down):
        def body(x):
            h = ub.all_gather_matmul(x, up, axis_name="tp")
            return ub.matmul_reduce_scatter(h, down, axis_name="tp")

        return jax.lax.while_loop(lambda x: x[0, 0] < 3, body, x)

    for function, note in ((scanned, "x 5"), (looped, "x in a loop")):
        run = on_ranks(function, tp_mesh(4), SPECS, P("tp"), check_vma=False)
        assert {row.note for row in ub.explain(run, *operands()).rows} == {note}


def test_layers_that_fell_back_during_tracing_have_a_reason():
    mesh = tp_mesh(NUM_RANKS)
    dense = functools.partial(linen.Dense, use_bias=False)
    up, down = (dense(16, dot_general=ub.dot_general(k)) for k in ("column", "row"))
    x, kernel = jnp.ones((2, 15, 16)), {"params": {"kernel": jnp.ones((16, 16))}}
    sharded = jax.device_put(kernel, NamedSharding(mesh, P("tp", None)))

    @jax.jit
    def layers(kernel, sharded, x):
        return down.apply(sharded, up.apply(kernel, x))

    with jax.set_mesh(mesh):
        for _ in range(2):
            found = ub.explain(
                jax.grad(lambda *a: layers(*a).sum()), kernel, sharded, x
            )
            assert {row.scope for row in found.rows} == {
                "linear(parallel='column')",
                "linear(parallel='row')",
            }
            for row in found.rows:
                assert (row.overlapped, row.method) == (False, "xla")
                assert "has 15 tokens (axis -2), which do not divide" in row.reason
            layers(kernel, sharded, x)


def test_fallbacks_of_other_programs_are_ignored():
    mesh = tp_mesh(NUM_RANKS)
    layer = linen.Dense(16, use_bias=False, dot_general=ub.dot_general("column"))
    kernel = {"params": {"kernel": jnp.ones((16, 16))}}

    def explained(rows):
        return ub.explain(jax.jit(layer.apply), kernel, jnp.ones((2, rows, 16))).rows

    with jax.set_mesh(mesh):
        (fallen,) = explained(15)
        assert "has 15 tokens" in fallen.reason
        # The last reason of this label in the process is about 17 tokens.
        explained(17)
        ub.fallbacks(clear=True)
        (again,) = explained(15)
        (divisible,) = explained(16)
    assert again == fallen
    assert (divisible.overlapped, divisible.reason) == (True, "")


@pytest.mark.parametrize("method", [None, *nightly("xla")])
def test_redundant_work_of_ranks_is_noted(method):
    def notes(mesh, batch, data_axes=None):
        sharding_layout = ShardingLayout(
            "column", ub_name="up", method=method, data_axes=data_axes
        )
        step = jax.grad(
            lambda w, x: (sharded_linear(sharding_layout, x, (w,))[0] ** 2).sum(),
            (0, 1),
        )
        ub.fallbacks(clear=True)
        with jax.set_mesh(mesh):
            rows = ub.explain(step, jnp.ones((16, 16)), jnp.ones((batch, 8, 16))).rows
        reasons = {one.reason for one in ub.fallbacks()}
        assert rows
        assert all(any(r in row.note for r in reasons or [""]) for row in rows)
        return reasons

    assert notes(dp_tp_mesh(2, 2), 4) == set()
    (reason,) = notes(dp_tp_mesh(2, 2), 3)
    assert "3 examples (axis 0), which do not divide into the ranks of" in reason
    assert "mesh axes {'dp': 2}: these ranks compute the same" in reason
    three = jax.make_mesh(
        (2, 2, 2), ("dp", "cp", "tp"), axis_types=3 * (AxisType.Auto,)
    )
    (reason,) = notes(three, 4, data_axes=("dp",))
    assert "data_axes = ('dp',) leaves out mesh axes {'cp': 2}: these" in reason
    (reason,) = notes(dp_tp_mesh(2, 2), 1)
    assert "1 examples" in reason


def test_indivisible_tokens_of_a_plain_layer_are_a_fallback():
    layer = Linear(16, 16, parallel=None, rngs=nnx.Rngs(0))
    ub.fallbacks(clear=True)
    with jax.set_mesh(tp_mesh(2)):
        layer(jnp.ones((2, 7, 16)))
        (found,) = ub.fallbacks()
        layer(jnp.ones((2, 8, 16)))
        assert ub.fallbacks() == (found,)
    assert "7 tokens, which do not divide into the ranks of mesh axes {'tp'" in (
        found.reason
    )


@pytest.mark.parametrize("name", ["a]b", "it's", 'a"b'])
def test_names_with_brackets_and_quotes_are_not_truncated(name):
    def layer(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name=name)

    run = on_ranks(layer, tp_mesh(NUM_RANKS), SPECS[:2], P(None, "tp"))
    (row,) = ub.explain(run, *operands()[:2]).rows
    assert row.scope == name


def test_recording_that_has_not_ended_is_an_error():
    run = mlp("pipeline")
    not_ended = pytest.raises(TraceError, match="recording that has not ended")
    with ub.trace() as recording, not_ended:
        ub.explain(run, *operands(), trace=recording)


def test_trace_adds_how_long_ranks_waited(tmp_path):
    run = mlp("pipeline")
    path = tmp_path / "step.json"
    with ub.trace(path) as recording:
        jax.block_until_ready(run(*operands()))
    for trace in (recording, recording.trace, path, [str(path)]):
        rows = ub.explain(run, *operands(), trace=trace).rows
        assert len(rows) == 2
        assert all(row.measured_exposed_s > 0 for row in rows)


def test_waits_for_a_scale_do_not_count_for_a_gather_of_the_same_layer():
    def loss(x, w):
        recipe = ub.fp8.Float8CurrentScaling()
        options = {"ub_name": "up", "method": "external", "fp8": recipe}
        return ub.all_gather_matmul(x, w, axis_name="tp", **options).sum()

    gradients = jax.grad(loss, (0, 1))
    run = on_ranks(gradients, tp_mesh(NUM_RANKS), SPECS[:2], SPECS[:2])
    with ub.trace() as recording:
        jax.block_until_ready(run(*operands()[:2]))
    trace = recording.trace
    of_x = {
        i
        for i, call in enumerate(trace.calls)
        if call.op == "all_gather" and call.operands.startswith("e4m3")
    }
    assert len(of_x) == 1
    # As if no rank had waited for x. Ranks have waited for the scales.
    spans = tuple(span for span in trace.spans if span.call not in of_x)
    rows = ub.explain(run, *operands()[:2], trace=Trace(trace.calls, spans)).rows
    waits = {row.op: row.measured_exposed_s for row in rows}
    assert waits["all_gather"] == 0


def test_function_that_has_run_is_explained_again():
    run, args = mlp(), operands()
    found = ub.explain(run, *args)
    assert len(found.rows) == 2
    assert ub.explain(run, *args) == found
    jax.block_until_ready(run(*args))
    assert ub.explain(run, *args) == found


def test_static_arguments_stay_static():
    @functools.partial(jax.jit, static_argnums=3, static_argnames="method")
    def scaled(x, up, down, count, *, method):
        return count * mlp(method)(x, up, down)

    found = ub.explain(scaled, *operands(), 3, method="pipeline")
    assert [row.method for row in found.rows] == ["pipeline", "pipeline"]


def test_flax_step_is_explained_before_and_after_it_runs():
    mesh = tp_mesh(NUM_RANKS)

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model, x: model(x).sum())(model, x)

    with jax.set_mesh(mesh):
        kernel = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        model = ub.overlap(nnx.List([kernel]), {"0": "column"})[0]
        x = jnp.ones((2, 64, 16))
        for _ in range(2):
            ops = [row.op for row in ub.explain(step, model, x).rows]
            assert ops == ["all_gather_matmul", "wgrad"]
            step(model, x)


def test_an_update_of_a_model_in_place_includes_the_backward_pass():
    @nnx.jit
    def step(model, x):
        value, gradients = nnx.value_and_grad(lambda m, x: m(x).sum())(model, x)
        nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model), gradients))
        return value

    with jax.set_mesh(jax.make_mesh((NUM_RANKS,), ("tp",))):
        model = nnx.List([nnx.Linear(16, 32, rngs=nnx.Rngs(0))])
        layer = ub.overlap(model, {"0": "column"})[0]
        found = ub.explain(step, layer, jnp.ones((8, 16)))
    assert [row.op for row in found.rows] == ["all_gather_matmul", "wgrad"]


def test_local_calls_have_nothing_to_communicate():
    def local(dy, w, residual):
        return ub.dgrad_add(dy, w, residual)

    shapes = [jnp.zeros(shape) for shape in ((8, 6), (4, 6), (8, 4))]
    [row] = ub.explain(local, *shapes).rows
    assert (row.op, row.moved_bytes, row.note) == (
        "matmul",
        None,
        "nothing to communicate",
    )


def test_program_without_linears_has_no_rows():
    assert str(ub.explain(lambda x: x + 1, 1.0)) == "lambda: no linears"


def test_flops_of_custom_calls_in_loops_are_counted():
    def layers(x, w):
        def step(x, w):
            h = ub.all_gather_matmul(x, w, axis_name="tp")
            return ub.matmul_reduce_scatter(h, w.T, axis_name="tp"), None

        return jax.lax.scan(step, x, jnp.stack([w] * 3))[0]

    M, K, N, P_ = 8 * NUM_RANKS, 16, 32 * NUM_RANKS, NUM_RANKS
    run = jax.shard_map(
        layers,
        mesh=tp_mesh(NUM_RANKS),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P("tp"),
    )
    found = ub.explain(run, jnp.ones((M, K)), jnp.ones((K, N)))
    one = 2 * M * K * N // P_
    assert [(row.flops, row.count) for row in found.rows] == [(one, 3)] * 2
    assert found.custom_call_flops == 6 * one
    assert "FLOP a rank, which cost_analysis() counts as 0" in str(found)
    assert " FLOP " in str(found).splitlines()[1]


@pytest.mark.parametrize("method", ["auto", "external", "xla"])
def test_flops_of_forward_and_backward_are_those_of_three_gemms(method):
    def loss(x, w):
        y = ub.all_gather_matmul(x, w, axis_name="tp", method=method)
        return jnp.sum(y * y)

    x, w = jnp.ones((8 * NUM_RANKS, 16)), jnp.ones((16, 32 * NUM_RANKS))
    run = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=tp_mesh(NUM_RANKS),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=(P("tp"), P(None, "tp")),
    )
    found = ub.explain(run, x, w)
    whole = 3 * 2 * x.shape[0] * 16 * 32
    assert found.custom_call_flops == (0 if method == "xla" else whole)
