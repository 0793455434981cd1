"""Tests `Sequential.explain`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src import lowering_log
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.runtime import cuda_engine, tuned_file
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, TunedKey, environment
from jax_ub._src.tools.explain import report


def mlp(**down):
    options = {"sequence_parallel": True, "userbuffers_options": {"comm_name": "fc1"}}
    make = ops.MakeExtraOutput()
    return ops.Sequential(
        make,
        ops.Linear(64, 256, tensor_parallel_mode="column", **options),
        ops.GELU(),
        ops.Linear(256, 64, tensor_parallel_mode="row", sequence_parallel=True, **down),
    )


def rows_of(table):
    return {row.scope: row for row in table.rows}


def test_every_linear_is_overlapped_or_has_a_reason():
    rows = rows_of(mlp().explain())
    assert list(rows) == [
        "1 BasicLinear 'fc1', forward",
        "1 BasicLinear 'fc1', backward",
        "4 BasicLinear, forward",
        "4 BasicLinear, backward",
    ]
    up, d_up, down, d_down = rows.values()
    assert (up.overlapped, up.op) == (True, "all_gather_matmul")
    assert up.note == "UserbuffersForwardLinear of 1-2"
    assert d_up.overlapped
    assert d_up.op == "matmul_reduce_scatter, wgrad"
    assert (down.overlapped, down.op) == (False, "matmul, reduce_scatter")
    option = 'no userbuffers_options={"comm_name": ...}'
    assert down.reason == f"UserbuffersForwardLinear: {option}"
    assert f"UserbuffersBackwardLinear: {option}" in d_down.reason
    overlapped = mlp(userbuffers_options={"comm_name": "fc2"}).explain()
    assert overlapped.overlapped
    assert rows_of(overlapped)["4 BasicLinear 'fc2', backward"].op.startswith(
        "all_gath"
    )


def test_text_lists_the_fused_operations():
    text = str(mlp().explain())
    assert "forward: 0 MakeExtraOutput; UserbuffersForwardLinear of 1-2 (Basic" in text
    assert "\nbackward: 0 MakeExtraOutput; UserbuffersBackwardLinear of 1-2" in text
    assert "yes         auto" in text
    assert "NO          auto    UserbuffersForwardLinear: no userbuffers_op" in text


def test_unknown_number_of_ranks_is_noted():
    note = (
        "not predicted, because the number of ranks is unknown: pass num_ranks, or "
        "call it under jax.set_mesh"
    )
    table = mlp().explain(4096)
    assert table.notes[-1] == note
    assert {row.predicted_s for row in table.rows} == {None}
    assert note not in mlp().explain().notes
    assert note not in mlp().explain(4096, num_ranks=2).notes


def test_activations_in_f64_are_not_predicted():
    in_f64 = ops.BasicLinear(64, 64, tensor_parallel_mode="column")
    in_bf16 = dataclasses.replace(in_f64, dtype=jnp.bfloat16)
    sequence = ops.Sequential(in_f64, in_bf16)
    table = sequence.explain(4096, num_ranks=2, dtype="float64")
    note = "float64 is not predicted, because the simulator has no rates for it"
    assert table.notes[-1] == note
    assert [row.predicted_s is None for row in table.rows] == [True, True, False, False]
    assert note not in sequence.explain(dtype="float64").notes


@pytest.mark.parametrize("dtype", [None, "bfloat", 16])
def test_dtype_that_is_none_is_rejected(dtype):
    text = f"dtype = {dtype!r} is not a dtype. Pass the dtype of the activations"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        mlp().explain(dtype=dtype)


def test_method_selects_the_ops_of_the_backward_pass():
    options = {"comm_name": "fc1", "method": "ring_exchange"}
    linear = ops.BasicLinear(
        8, 8, tensor_parallel_mode="column", sequence_parallel=True,
        userbuffers_options=options,
    )  # fmt: skip
    _, backward = ops.Sequential(linear).explain().rows
    assert (backward.op, backward.method) == (
        "matmul_reduce_scatter, all_gather, wgrad",
        "ring_exchange",
    )
    for method, reason in (
        ("xla", "is plain jax.lax"),
        ("external", "communicates before or after the GEMM"),
    ):
        options["method"] = method
        plain = dataclasses.replace(linear, userbuffers_options=options)
        forward, _ = ops.Sequential(plain).explain().rows
        assert not forward.overlapped
        assert forward.reason == f'method "{method}" {reason}'


@pytest.mark.parametrize(
    ("method", "op"),
    [
        (Method.BULK, "bulk_all_gather, bulk_reduce_scatter"),
        (Method.PIPELINE, "matmul_reduce_scatter, all_gather, wgrad"),
        (Method.XLA, "matmul_reduce_scatter, all_gather, wgrad"),
        (Method.EXTERNAL, "matmul_reduce_scatter, all_gather, wgrad"),
    ],
)
def test_tuned_gradients_are_shown_for_their_sizes(tmp_path, monkeypatch, method, op):
    case = TunedKey(COLUMN_GRADIENTS, 2, 4096, 64, 256, "bfloat16")
    tuned_file.write(
        tmp_path / "t.json", {environment(): {case: (MethodChoice(method), {})}}
    )
    monkeypatch.setenv("JAX_UB_TUNED", str(tmp_path / "t.json"))
    backward = mlp().explain(4096, num_ranks=2).rows[1]
    assert (backward.op, backward.method) == (op, method.value)
    assert backward.overlapped == (method in (Method.BULK, Method.PIPELINE))
    assert mlp().explain(64, num_ranks=2).rows[1].method == "auto"


@pytest.mark.parametrize("mode", ["column", "row"])
def test_rejected_layouts_without_sequence_parallelism_are_not_overlapped(mode):
    linear = ops.Linear(
        64, 64, tensor_parallel_mode=mode, userbuffers_options={"comm_name": "fc1"}
    )
    forward, backward = ops.Sequential(linear).explain().rows
    assert not forward.overlapped
    assert not backward.overlapped
    assert forward.reason == backward.reason
    assert "rejected" in forward.reason
    assert "sequence_parallel=True" in forward.reason
    behind = ops.ReduceScatter()
    plain = dataclasses.replace(linear, tensor_parallel_mode=None, use_bias=False)
    assert ops.Sequential(plain, behind).explain().overlapped


def test_fallbacks_of_other_programs_are_ignored():
    label = "UserbuffersForwardLinear (ub_name 'fc1')"
    lowering_log.record_fallback(label, "it was lowered for an abstract mesh")
    forward, backward = list(rows_of(mlp().explain()).values())[:2]
    assert (forward.overlapped, forward.reason) == (True, "")
    assert backward.overlapped


def test_separate_collectives_and_local_linears_have_rows():
    linear = ops.BasicLinear(8, 8, userbuffers_options={"comm_name": "fc2"})
    seq = ops.Sequential(linear, ops.ReduceScatter(), linear, ops.AllReduce())
    rows = seq.explain().rows
    # The first operation is one of three that run as one GEMM+RS.
    assert rows[0].op == "matmul_reduce_scatter"
    assert rows[0].note == "UserbuffersForwardLinear of 0-1"
    local, _, forward, backward = rows[2:]
    assert (local.overlapped, local.op, local.note) == (
        True,
        "matmul",
        "no communication",
    )
    assert forward.op == "all_reduce"
    assert forward.reason == "no GEMM overlaps it"
    assert (backward.overlapped, backward.note) == (True, "identity")
    summed = ops.Sequential(ops.AllReduce(reduce_in_backward=True)).explain().rows[1]
    assert (summed.overlapped, summed.op, summed.note) == (False, "all_reduce", "")


def test_times_and_bytes_are_predicted_for_known_sizes():
    none = mlp().explain(4096)
    assert all(row.predicted_s is None for row in none.rows)
    table = mlp().explain(4096, num_ranks=4, hardware="h200")
    up, d_up = table.rows[:2]
    # Three quarters of the tokens come from the other ranks, in bf16.
    assert up.moved_bytes == 3 / 4 * 4096 * 64 * 2
    assert 0 < up.predicted_s < d_up.predicted_s


@pytest.mark.parametrize("method", ["ring_exchange", "pipeline", "external"])
def test_an_array_that_is_gathered_before_the_wgrad_is_counted_once(method):
    def explained(method):
        named = {"comm_name": "fc1", "method": method}
        options = {"sequence_parallel": True, "userbuffers_options": named}
        linear = ops.BasicLinear(64, 64, tensor_parallel_mode="column", **options)
        return ops.Sequential(linear).explain(4096, num_ranks=4, hardware="h200").rows

    forward, backward = explained(method)
    assert backward.op == "matmul_reduce_scatter, all_gather, wgrad"
    assert backward.moved_bytes == 2 * forward.moved_bytes
    # With "auto", the wgrad gathers x itself.
    assert backward.moved_bytes == explained("auto")[1].moved_bytes


def test_linears_with_a_recipe_send_fp8_operands_and_wide_sums():
    def explained(fp8):
        options = {"sequence_parallel": True, "fp8": fp8}
        named = {"userbuffers_options": {"comm_name": "fc1"}, **options}
        seq = ops.Sequential(
            ops.Linear(64, 64, tensor_parallel_mode="column", **named),
            ops.Linear(64, 64, tensor_parallel_mode="row", **options),
        )
        return seq.explain(4096, num_ranks=4, hardware="h200").rows

    recipe = ub.fp8.Float8CurrentScaling()
    wide, fp8 = explained(None), explained(recipe)
    sent = [row.moved_bytes for row in wide]
    one = sent[0]
    assert sent == [one, 2 * one, one, one]
    # In the backward of "column", the GEMM+RS sends bf16 sums, and the wgrad reads x.
    assert [row.moved_bytes for row in fp8] == [one / 2, 3 / 2 * one, one, one / 2]
    assert all(a.predicted_s < b.predicted_s for a, b in zip(fp8, wide, strict=True))


@pytest.fixture
def wire_fp8():
    """Configures the four names of a column and a row layer to send FP8."""

    def configure(**more):
        names = ("qkv_fprop", "qkv_dgrad", "proj_fprop", "proj_dgrad")
        cfgs = {name: {"wire_dtype": "fp8", **more.get(name, {})} for name in names}
        ub.initialize_ub([256, 64], 2, ub_cfgs=cfgs, mesh=tp_mesh(2))
        sequence = {"sequence_parallel": True, "use_bias": False}
        return ops.Sequential(
            *(
                ops.Linear(
                    *(64, 64),
                    tensor_parallel_mode=mode,
                    userbuffers_options={"comm_name": name},
                    **sequence,
                )
                for mode, name in (("column", "qkv"), ("row", "proj"))
            )
        )

    yield configure
    ub.destroy_ub()


def test_arrays_that_a_name_sends_as_fp8_have_one_byte(wire_fp8):
    seq = wire_fp8()
    rows = seq.explain(256, num_ranks=2, hardware="cpu").rows
    one = 256 * 64 // 2  # bytes of a tensor in FP8 that a rank sends
    up, d_up, down, d_down = rows
    assert up.op == "all_gather_matmul"
    assert d_up.op == "bulk_all_gather, bulk_reduce_scatter"  # RS in bf16
    assert d_down.op == "all_gather_matmul, matmul"
    assert [row.moved_bytes for row in rows] == [one, 3 * one, one, one]
    assert [row.overlapped for row in rows] == [True, True, False, True]
    assert down.op == "matmul, all_to_all"
    assert down.reason == "its partial sums are sent as FP8, by XLA's all-to-all"
    apply = jax.shard_map(
        seq, mesh=tp_mesh(2), in_specs=(seq.specs(), P("tp")), out_specs=P("tp")
    )
    params, x = jax.eval_shape(
        lambda: (seq.init(jax.random.key(0)), jnp.zeros((256, 64), jnp.bfloat16))
    )
    params = jax.tree.map(lambda p: p.update(dtype=jnp.bfloat16), params)

    def loss(params, x):
        return jnp.square(apply(params, x)).astype(jnp.float32).sum()

    found = ub.explain(jax.value_and_grad(loss, (0, 1)), params, x, hardware="cpu")
    sent = {(row.scope, row.op): row.moved_bytes for row in found.rows}
    assert sent["qkv", "all_gather_matmul"] == up.moved_bytes
    assert sent["proj", "all_gather_matmul"] == d_down.moved_bytes
    assert sent["qkv", "bulk_all_gather"] == one
    (fallen,) = (row for row in found.rows if not row.overlapped)
    assert (fallen.scope, fallen.reason) == ("proj", down.reason)


def test_a_dgrad_that_sends_fp8_sums_gathers_x_separately(wire_fp8):
    seq = wire_fp8(qkv_dgrad={"method": "ring_exchange"})
    backward = seq.explain(256, num_ranks=2).rows[1]
    assert backward.op == "matmul, all_to_all, all_gather, wgrad"
    assert "all-to-all" in backward.reason


def test_gpus_gather_fp8_before_they_multiply_wide_arrays(wire_fp8, monkeypatch):
    seq = wire_fp8()
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    up, d_up, _, d_down = seq.explain(256, num_ranks=2, hardware="h100").rows
    assert up.op == d_down.op == "all_gather, matmul"
    assert "which GPUs do not multiply by wide arrays" in up.reason == d_down.reason
    assert not (up.overlapped or d_down.overlapped)
    assert d_up.overlapped  # bulk


def test_mesh_in_scope_gives_the_number_of_ranks():
    seq = mlp()
    with jax.set_mesh(tp_mesh(1)):
        up = seq.explain(64).rows[0]
    assert up.reason == "UserbuffersForwardLinear: axis 'tp' has one rank"
    seen = []

    def step(params, x):
        seen.append(seq.explain(64).rows[0])
        return seq(params, x)[0]

    run = jax.shard_map(
        step, mesh=tp_mesh(2), in_specs=(seq.specs(), P("tp")), out_specs=P("tp")
    )
    params = jax.eval_shape(seq.init, jax.random.key(0))
    jax.eval_shape(run, params, np.zeros((8, 64), "float32"))
    assert seen[0].overlapped
    assert seen[0].moved_bytes == 64 / 2 * 64 * 2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_layout_has_a_row(sequence_parallel):
    for mode in ("column", "row", None):
        linear = ops.BasicLinear(
            8, 8, tensor_parallel_mode=mode, sequence_parallel=sequence_parallel
        )
        rows = ops.Sequential(linear).explain(64, num_ranks=2).rows
        communicates = {
            ("column", True): (True, True),
            ("column", False): (False, True),
            ("row", True): (True, True),
            ("row", False): (True, False),
        }.get((mode, sequence_parallel), (False, False))
        assert tuple(row.moved_bytes > 0 for row in rows) == communicates
        assert tuple(not row.overlapped for row in rows) == communicates


def test_trace_adds_how_long_ranks_waited():
    options = {"sequence_parallel": True, "axis_name": "tp"}
    column = {
        "tensor_parallel_mode": "column",
        "userbuffers_options": {"comm_name": "fc1"},
    }
    seq = ops.Sequential(
        ops.BasicLinear(8, 16, method="ring_exchange", **column, **options)
    )
    mesh, tokens = tp_mesh(2), P("tp")
    apply = jax.shard_map(
        seq, mesh=mesh, in_specs=(seq.specs(), tokens), out_specs=P(None, "tp")
    )

    def loss(params, x):
        return apply(params, x).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    params, x = seq.init(jax.random.key(0)), np.ones((4, 8), np.float32)
    with ub.trace() as recording:
        jax.block_until_ready(step(params, x))
    waited = recording.trace.exposed_by_op_s()
    forward, backward = seq.explain(trace=recording.trace).rows
    assert forward.measured_exposed_s in waited.values()
    assert backward.op == "matmul_reduce_scatter, all_gather, wgrad"
    assert sum(waited.values()) == pytest.approx(
        forward.measured_exposed_s + backward.measured_exposed_s
    )
    assert seq.explain().rows[0].measured_exposed_s is None


@pytest.mark.parametrize("name", ["tokens", "num_ranks"])
@pytest.mark.parametrize("value", [0, -4, "4", 4.0, True])
def test_counts_that_are_not_positive_integers_are_errors(name, value):
    text = f"explain: {name} = {value!r} is not a positive integer. Pass one"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        mlp().explain(**{"tokens": 64, "num_ranks": 4, name: value})


def test_tokens_that_do_not_divide_into_the_ranks_are_an_error():
    text = "explain: tokens = 66 does not divide into 4 ranks.*Use tokens = 68"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        mlp().explain(tokens=66, num_ranks=4)


def test_times_are_predicted_for_the_local_devices(monkeypatch):
    def times(**options):
        rows = mlp().explain(64, num_ranks=2, **options).rows
        return [row.predicted_s for row in rows]

    assert times() == times(hardware="cpu") != times(hardware="h200")
    monkeypatch.setattr(report, "_local_machine", lambda: None)
    assert times() == times(hardware="h200")
    (note,) = mlp().explain(64, num_ranks=2).notes[-1:]
    assert note.startswith("unknown device 'cpu': times are predicted for h200")
