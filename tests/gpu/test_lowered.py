"""Programs lowered for CUDA devices, which needs no GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_programs import (
    WORKSPACE_BYTES,
    attribute,
    called,
    collectives,
    cuda_text,
    custom_calls,
    exported_cuda_text,
    shape,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import dp_tp_mesh, execution, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.lowering_log import recording
from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.collectives import all_gather, bulk_all_gather
from jax_ub._src.primitives.lowering import cuda_variant
from jax_ub._src.primitives.matmuls import MatmulAllReduce, matmul
from jax_ub._src.primitives.mesh import find_ranks
from jax_ub._src.runtime import cuda_engine
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES
from jax_ub.errors import UnsupportedOverlapError

COLUMN = (P("tp"), P(None, "tp"))
ROW = (P(None, "tp"), P("tp"))


def column(mesh, **options):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", **options)

    return on_ranks(function, mesh, COLUMN, P(None, "tp"))


def row(mesh, function=ub.matmul_reduce_scatter, **options):
    def run(x, w):
        return function(x, w, axis_name="tp", **options)

    out = P("tp") if function is ub.matmul_reduce_scatter else P()
    return on_ranks(run, mesh, ROW, out)


def the_call(text):
    (found,) = custom_calls(text)
    return found


def test_a_call_ends_with_its_workspace(engine):
    name, call = the_call(cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8)))
    assert name == "all_gather_matmul"
    assert f"-> (tensor<8x2xf32>, tensor<{WORKSPACE_BYTES}xui8>)" in call
    ((op, attributes, operands, results),) = engine.asked
    assert op == "all_gather_matmul"
    assert operands == [("float32", (2, 6)), ("float32", (6, 2))]
    assert results == [("float32", (8, 2))]
    assert attributes["ranks"] == [0, 1, 2, 3]
    assert {type(value) for value in attributes.values()} == {int, float, str, list}


def test_a_call_has_no_side_effects(engine):
    """With side effects, the XLA of jax 0.11 would run a call in a scan twice."""
    _, call = the_call(cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8)))
    assert "has_side_effect = true" not in call


def test_auto_is_recorded_as_the_method_that_runs(engine):
    with recording() as lowered:
        cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8))
        cuda_text(row(tp_mesh(4)), shape(8, 8), shape(8, 6))
    assert [one.method for one in lowered] == [Method.PIPELINE, Method.RING_EXCHANGE]


def test_calls_of_several_processes_have_names_that_all_of_them_know(
    engine, monkeypatch
):
    def channel():
        text = cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8))
        return attribute(the_call(text)[1], "channel")

    assert channel() == ""
    monkeypatch.setattr(
        "jax_ub._src.primitives.lowering.find_ranks",
        lambda *args: dataclasses.replace(find_ranks(*args), spans_processes=True),
    )
    first = channel()
    assert re.fullmatch(r"jit_\w+/\d+", first)
    assert channel() == first


def test_the_engine_and_xla_get_the_same_attributes(engine):
    _, call = the_call(cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8)))
    ((_, attributes, _, _),) = engine.asked
    passed = {name for name in re.findall(r"(\w+) = ", call)} & set(attributes)
    assert passed == set(attributes)
    for name, value in attributes.items():
        if type(value) in (int, str):
            assert attribute(call, name) == value


@pytest.mark.parametrize(
    ("method", "lowered"),
    [("auto", "pipeline"), ("pipeline", "pipeline"), ("ring_exchange",) * 2]
    + [("external",) * 2],
)
def test_gathering_pushes_chunks(engine, method, lowered):
    text = cuda_text(column(tp_mesh(2), method=method), shape(8, 6), shape(6, 8))
    _, call = the_call(text)
    assert attribute(call, "method") == Method(lowered).code
    assert attribute(call, "num_splits") == 0


@pytest.mark.parametrize("function", [ub.matmul_reduce_scatter, ub.matmul_all_reduce])
def test_sums_go_to_the_rank_that_owns_them(engine, function):
    text = cuda_text(row(tp_mesh(2), function), shape(8, 6), shape(6, 8))
    _, call = the_call(text)
    assert attribute(call, "method") == Method.RING_EXCHANGE.code
    assert not collectives(text)


def all_reduced(num_ranks, tokens):
    def function(x):
        return ub.all_reduce(x, axis_name="tp")

    run = on_ranks(function, tp_mesh(num_ranks), P("tp"), P(), check_vma=False)
    return cuda_text(run, shape(num_ranks * tokens, 1024))


def variant(text):
    return Variant(list(Variant)[attribute(the_call(text)[1], "variant")])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_few_tokens_are_summed_in_one_exchange(engine, num_ranks):
    # The largest number of tokens of 4 KiB that a rank may send to all peers together.
    most = ONE_SHOT_BYTES // 4096 // (num_ranks - 1)
    assert variant(all_reduced(num_ranks, most)) is Variant.ONE_SHOT
    assert variant(all_reduced(num_ranks, most + 1)) is Variant.PLAIN


def test_only_a_method_that_is_not_explicit_sums_in_one_exchange(engine):
    operands = shape(8, 6), shape(6, 8)
    reduce = ub.matmul_all_reduce
    assert variant(cuda_text(row(tp_mesh(2), reduce), *operands)) is Variant.ONE_SHOT
    for method in ("ring_exchange", "pipeline"):
        text = cuda_text(row(tp_mesh(2), reduce, method=method), *operands)
        assert variant(text) is Variant.PLAIN
    assert variant(cuda_text(row(tp_mesh(2)), *operands)) is Variant.PLAIN


def summed(tokens, choice, num_pairs=1, num_ranks=8, out_dtype=jnp.bfloat16):
    """Returns the variant of an all-reduce of `tokens` tokens with 1024 features."""
    run = Execution(label="test", choice=choice, axis_name=("tp",), num_ranks=num_ranks)
    call = MatmulAllReduce(
        execution=run,
        scale=1.0,
        num_pairs=num_pairs,
        rhs_transposed=False,
        has_bias=False,
        has_residual=False,
        out_dtype=jnp.dtype(out_dtype),
    )
    x = jax.ShapeDtypeStruct((tokens, 4), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16)
    return cuda_variant(call, [x] * num_pairs + [w] * num_pairs)


def test_f32_partial_sums_and_results_halve_the_limit_of_tokens():
    most = ONE_SHOT_BYTES // (7 * 2048)
    auto = MethodChoice(Method.AUTO)
    for wider, tokens in (
        ({}, most),
        ({"num_pairs": 2}, most // 2),
        ({"out_dtype": jnp.float32}, most // 2),
    ):
        assert summed(tokens, auto, **wider) is Variant.ONE_SHOT
        assert summed(tokens + 1, auto, **wider) is Variant.PLAIN


def test_a_tuned_one_shot_is_kept_if_every_heap_is_large_enough():
    one_shot = KernelOptions(variant=Variant.ONE_SHOT)
    tuned = MethodChoice(Method.RING_EXCHANGE, kernel_options=one_shot)
    # A tuned one-shot exchange may have any number of tokens if the slots need at most
    # the 8 bytes per element of the capacity.
    assert summed(8192, tuned, num_ranks=5) is Variant.ONE_SHOT
    assert summed(8192, tuned, num_ranks=5, num_pairs=2) is Variant.PLAIN
    most = ONE_SHOT_BYTES // (7 * 2048)
    assert summed(most, tuned) is Variant.ONE_SHOT
    assert summed(most + 1, tuned) is Variant.PLAIN
    assert summed(8, MethodChoice(Method.RING_EXCHANGE)) is Variant.PLAIN


def test_a_separate_collective_runs_by_its_method_or_is_rejected(engine):
    def run(method):
        def function(x):
            return all_gather(execution(method, 2), x)

        return on_ranks(function, tp_mesh(2), P("tp"), P(None), check_vma=False)

    for method, runs in (
        (Method.AUTO, Method.PIPELINE),
        (Method.RING_EXCHANGE, Method.RING_EXCHANGE),
    ):
        _, call = the_call(cuda_text(run(method), shape(8, 6)))
        assert attribute(call, "method") == runs.code
    with pytest.raises(UnsupportedOverlapError, match="buffers are not mapped"):
        cuda_text(run(Method.DIRECT), shape(8, 6))


@pytest.mark.parametrize("method", [Method.AUTO, Method.DIRECT])
def test_a_local_product_is_the_engines_too(engine, method):
    def function(xs, ws):
        return matmul(execution(method), xs, ws, out_dtype="float32")

    text = cuda_text(jax.jit(function), (shape(4, 6),), (shape(6, 8),))
    name, call = the_call(text)
    assert (name, attribute(call, "method")) == ("matmul", Method.DIRECT.code)


def test_bulk_stays_bulk(engine):
    def function(dy, w, x):
        return bulk_all_gather(execution(Method.BULK, 2), (dy,), (w,), x)

    specs = (P(None, "tp"), P(None, "tp"), P("tp"))
    run = on_ranks(function, tp_mesh(2), specs, (P(), P()), check_vma=False)
    name, call = the_call(cuda_text(run, shape(8, 4), shape(6, 4), shape(8, 6)))
    assert (name, attribute(call, "method")) == ("bulk_all_gather", Method.BULK.code)


def test_residuals_of_a_dgrad_are_written_in_place(engine):
    run = jax.jit(ub.dgrad_add)
    _, call = the_call(cuda_text(run, shape(8, 3), shape(6, 3), shape(8, 6)))
    assert "output_tuple_indices = [0], operand_index = 2" in call


def test_every_group_is_in_the_table(engine):
    mesh = dp_tp_mesh(2, 3)
    run = on_ranks(
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
        mesh,
        (P(("dp", "tp")), P(None, "tp")),
        P("dp", "tp"),
    )
    _, call = the_call(cuda_text(run, shape(12, 6), shape(6, 9)))
    assert "ranks = dense<[0, 1, 2, 3, 4, 5]>" in call


def test_a_call_ends_with_its_partition_where_it_is_exported(engine):
    operands = shape(8, 6), shape(6, 8)
    text = exported_cuda_text(column(tp_mesh(4)), *operands)
    _, call = the_call(text)
    assert "devices = dense<[0, 1, 2, 3]> : tensor<4xi64>" in call
    (partition,) = re.findall(r"(%\w+) = stablehlo.partition_id", text)
    assert re.match(rf"\(%\w+, %\w+, {partition}\) ", call)
    assert ": (tensor<2x6xf32>, tensor<6x2xf32>, tensor<ui32>) -> " in call
    ((_, attributes, asked, _),) = engine.asked
    assert attributes["devices"] == [0, 1, 2, 3]
    assert asked == [("float32", (2, 6)), ("float32", (6, 2))]


def test_only_what_is_exported_has_a_partition(engine):
    text = cuda_text(column(tp_mesh(4)), shape(8, 6), shape(6, 8))
    assert "partition_id" not in text
    assert "devices = " not in the_call(text)[1]


def test_a_local_call_has_no_partition_where_it_is_exported(engine):
    run = jax.jit(ub.dgrad_add)
    text = exported_cuda_text(run, shape(8, 3), shape(6, 3), shape(8, 6))
    name, call = the_call(text)
    assert name == "matmul"
    assert "output_tuple_indices = [0], operand_index = 2" in call
    assert "partition_id" not in text


def test_partitions_are_those_of_the_whole_mesh(engine):
    run = on_ranks(
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="dp"),
        dp_tp_mesh(2, 3),
        (P(("tp", "dp")), P(None, "dp")),
        P("tp", "dp"),
    )
    _, call = the_call(exported_cuda_text(run, shape(12, 6), shape(6, 8)))
    assert "ranks = dense<[0, 3, 1, 4, 2, 5]>" in call
    assert "devices = dense<[0, 1, 2, 3, 4, 5]>" in call


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (column, {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "wgrad": 1}),
        (row, {"matmul_reduce_scatter": 1, "all_gather_matmul": 1, "wgrad": 1}),
    ],
)
def test_the_backward_pass_has_no_stray_collective(engine, make, expected):
    run = make(tp_mesh(4))

    def loss(x, w):
        return (run(x, w) ** 2).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = cuda_text(step, shape(8, 8), shape(8, 8))
    assert called(text) == expected
    assert not collectives(text)
    workspaces = re.findall(rf"tensor<{WORKSPACE_BYTES}xui8>\)", text)
    assert len(workspaces) == sum(expected.values())


def test_configurations_act(engine):
    mesh = tp_mesh(2)
    cfgs = {
        "qkv_fprop": {
            "method": "ring_exchange",
            "use_ce": False,
            "num_sm": 6,
            "cga_size": 2,
            "set_sm_margin": True,
            "comm_priority": -2,
            "gemm_priority": -1,
        },
        "fc1_fprop": {"method": "pipeline", "num_splits": 3, "set_sm_margin": False},
        "mine": {"method": "pipeline", "comm_type": "AG", "use_ce": False, "num_sm": 8},
    }
    ub.initialize_ub((8, 8), 2, mesh=mesh, ub_cfgs=cfgs)
    operands = shape(8, 6), shape(6, 8)
    _, call = the_call(cuda_text(column(mesh, ub_name="qkv"), *operands))
    for name, value in {
        "method": Method.RING_EXCHANGE.code,
        "use_ce": 0,
        "num_sm": 6,
        "cga_size": 2,
        "sm_margin": 6,
        "comm_priority": -2,
        "gemm_priority": -1,
    }.items():
        assert attribute(call, name) == value
    _, call = the_call(cuda_text(column(mesh, ub_name="fc1"), *operands))
    assert attribute(call, "num_splits") == 3
    # With copy engines, GEMMs leave room for the kernels that wait, signal and sum.
    assert (attribute(call, "use_ce"), attribute(call, "sm_margin")) == (1, 4)
    _, call = the_call(cuda_text(column(mesh, ub_name="mine"), *operands))
    assert (attribute(call, "use_ce"), attribute(call, "num_sm")) == (0, 8)


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_used_only_where_it_is_asked_for(engine, allowed, monkeypatch):
    if allowed:
        monkeypatch.setenv("JAX_UB_ALLOW_TF32", "1")
    _, call = the_call(cuda_text(column(tp_mesh(2)), shape(8, 6), shape(6, 8)))
    assert attribute(call, "allow_tf32") == allowed


def refused(mesh, match, **options):
    """Asserts that a named method raises an error, and that "auto" falls back."""
    operands = shape(8, 6), shape(6, 8)
    with pytest.raises(UnsupportedOverlapError, match=match):
        cuda_text(column(mesh, method="pipeline", **options), *operands)
    text = cuda_text(column(mesh, **options), *operands)
    assert not custom_calls(text)
    assert collectives(text) == {"all_gather": 1}
    assert re.search(match, f"cannot run: {ub.fallbacks()[-1].reason}")


def test_direct_is_refused(engine):
    message = (
        r"all_gather_matmul: method \"direct\" cannot run: on CUDA peers' buffers are "
        r'not mapped; chunks are pushed into slots, by "ring_exchange", "pipeline" or '
    )
    with pytest.raises(UnsupportedOverlapError, match=message):
        cuda_text(column(tp_mesh(2), method="direct"), shape(8, 6), shape(6, 8))


@pytest.mark.parametrize("aggregate", [False, True])
def test_aggregation_is_an_attribute_on_both_platforms(engine, aggregate):
    mesh = tp_mesh(2)
    entry = {"method": "ring_exchange", "aggregate": aggregate}
    ub.initialize_ub((8, 8), 2, mesh=mesh, ub_cfgs={"qkv_fprop": entry})
    run = column(mesh, ub_name="qkv")
    text = run.lower(jnp.ones((8, 6)), jnp.ones((6, 8))).as_text()
    for found in (cuda_text(run, shape(8, 6), shape(6, 8)), text):
        _, call = the_call(found)
        assert attribute(call, "variant") == aggregate


def test_more_ranks_than_flags_are_refused(engine, monkeypatch):
    monkeypatch.setattr(cuda_engine, "MOST_RANKS", 3)
    refused(tp_mesh(4), r"cannot run: it has 4 ranks, and the CUDA engine at most 3")


def test_an_engine_that_was_not_built_is_a_reason(monkeypatch):
    def missing():
        raise ImportError("jax_ub: its CUDA engine jax_ub._cuda is missing")

    monkeypatch.setattr(cuda_engine, "load", missing)
    refused(tp_mesh(2), "cannot run: jax_ub: its CUDA engine jax_ub._cuda is missing")


def test_a_driver_that_is_too_old_is_a_reason(engine, monkeypatch):
    engine.why_not = lambda: "the driver is for CUDA 11.4, older than 12.3"
    # If no device runs the program, the driver is not used.
    assert called(cuda_text(column(tp_mesh(2)), shape(8, 6), shape(6, 8)))
    monkeypatch.setattr(cuda_engine, "local_devices", jax.local_devices)
    refused(tp_mesh(2), "cannot run: the driver is for CUDA 11.4")


def test_devices_that_cannot_reach_each_other_are_a_reason(engine, monkeypatch):
    monkeypatch.setattr(cuda_engine, "is_cuda", lambda device: True)
    engine.why_no_peers = lambda ordinals: f"devices {ordinals} cannot reach each other"
    refused(tp_mesh(2), r"cannot run: devices \[0, 1\] cannot reach each other")


def test_a_mesh_without_devices_is_a_reason(engine):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    mesh = tp_mesh(2).abstract_mesh
    out = P(None, "tp")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=COLUMN, out_specs=out)
    operands = (
        jax.ShapeDtypeStruct(sizes, "float32", sharding=NamedSharding(mesh, spec))
        for sizes, spec in zip(((8, 6), (6, 8)), COLUMN, strict=True)
    )
    assert not custom_calls(cuda_text(jax.jit(mapped), *operands))
    assert "abstract mesh" in ub.fallbacks()[-1].reason


def test_calls_on_cpus_have_no_options_of_gpus():
    text = column(tp_mesh(2)).lower(jnp.ones((8, 6)), jnp.ones((6, 8))).as_text()
    (_, call), *_ = custom_calls(text)
    assert "use_ce" not in call
    assert "xui8>" not in call


def test_a_tuning_is_hashable_by_every_field():
    for field in dataclasses.fields(KernelOptions):
        other = dataclasses.replace(KernelOptions(), **{field.name: np.int64(7)})
        assert other != KernelOptions()
        assert hash(other) != hash(KernelOptions())


def test_the_wgrad_reads_what_the_dgrad_gathered_if_gpus_are_the_default(
    engine, monkeypatch
):
    monkeypatch.setattr(cuda_engine, "is_default", lambda: True)
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    run = row(tp_mesh(4), ub_name="reused")  # a trace that no other test has left
    step = jax.jit(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), argnums=(0, 1)))
    text = cuda_text(step, shape(8, 8), shape(8, 8))
    calls = dict(custom_calls(text))
    assert attribute(calls["all_gather_matmul"], "return_gathered") == 1
    assert attribute(calls["wgrad"], "gather") == 0


@pytest.mark.parametrize("method", [None, "ring_exchange"])
@pytest.mark.parametrize("parallel", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_one_rank_is_left_to_xla_unless_a_method_is_named(
    engine, parallel, sequence_parallel, method, monkeypatch
):
    monkeypatch.setattr(cuda_engine, "is_traced_for", lambda: True)
    before = ub.fallbacks()

    def layer(x, w):
        options = {"sequence_parallel": sequence_parallel, "method": method}
        return ub.linear(x, w, parallel=parallel, axis_name="tp", **options)

    specs = COLUMN if parallel == "column" else ROW
    run = on_ranks(layer, tp_mesh(1), specs, P(None, "tp"))
    step = jax.grad(lambda x, w: (run(x, w) ** 2).sum(), argnums=(0, 1))
    text = cuda_text(jax.jit(step), shape(8, 8), shape(8, 8))
    assert bool(called(text)) == (method is not None)
    assert ub.fallbacks() == before
    if method is None:
        assert text.count("dot_general") == 3
