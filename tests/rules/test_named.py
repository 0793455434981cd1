"""Calls with a `ub_name` run as `initialize_ub` configured it, forward and backward."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from covering import covering, nightly
from jax import P
from operands import assert_equal, small_integers
from programs import call_lines, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.methods import Method
from jax_ub._src.runtime import registry, settings

COLUMN = (P("tp"), P(None, "tp"))
ROW = (P(None, "tp"), P("tp"))
CODES = {m.code: m.value for m in Method if m not in (Method.AUTO, Method.XLA)}


def initialize(**cfgs):
    ub.initialize_ub((64, 32), 4, dtype=jnp.float32, ub_cfgs=cfgs, mesh=tp_mesh(4))


def column(**options):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", **options)

    return on_ranks(function, tp_mesh(4), COLUMN, P(None, "tp"))


def row(**options):
    def function(x, w):
        return ub.matmul_reduce_scatter(x, w, axis_name="tp", **options)

    return on_ranks(function, tp_mesh(4), ROW, P("tp"))


def operands():
    return small_integers(0, (64, 32)), small_integers(1, (32, 16))


def with_gradients(function, *argnums):
    def run(x, w):
        y, pullback = jax.vjp(
            lambda *changed: call(function, x, w, argnums, changed),
            *[(x, w)[i] for i in argnums],
        )
        return y, pullback(y)

    return jax.jit(run)


def call(function, x, w, argnums, changed):
    given = [x, w]
    for place, value in zip(argnums, changed, strict=True):
        given[place] = value
    return function(*given)


def lowered(function, *argnums):
    """Counts the calls by target and method: {"target method": n}."""
    text = with_gradients(function, *argnums).lower(*operands()).as_text()
    found = re.findall(
        r"@jax_ub\$(\w+)\(.*?method = (\d)[^}]*?num_splits = (\d+)", text
    )
    return collections.Counter(
        f"{target} {CODES[int(method)]}" + (f" {splits}" if splits != "0" else "")
        for target, method, splits in found
    )


def test_the_defaults_of_a_column_layer_are_transformer_engines():
    initialize()
    assert lowered(column(ub_name="qkv"), 0, 1) == {
        "all_gather_matmul ring_exchange": 1,
        "bulk_all_gather bulk": 1,
        "bulk_reduce_scatter bulk": 1,
    }


def test_the_defaults_of_a_row_layer_are_transformer_engines():
    initialize()
    assert lowered(row(ub_name="proj"), 0, 1) == {
        "matmul_reduce_scatter pipeline 4": 1,
        "all_gather_matmul ring_exchange": 1,
        "wgrad direct": 1,
    }


def test_each_pass_has_its_own_method():
    initialize(
        fc1_fprop={"method": "pipeline", "num_splits": 3},
        fc1_dgrad={"method": "ring_exchange"},
    )
    assert lowered(column(ub_name="fc1"), 0, 1) == {
        "all_gather_matmul pipeline 3": 1,
        "matmul_reduce_scatter ring_exchange": 1,
        "all_gather ring_exchange": 1,
        "wgrad direct": 1,
    }


def test_a_direct_dgrad_lets_the_wgrad_read_in_place():
    initialize(fc1_dgrad={"method": "direct"}, fc2_dgrad={"method": None})
    assert lowered(column(ub_name="fc1"), 0, 1) == {
        "all_gather_matmul ring_exchange": 1,
        "matmul_reduce_scatter direct": 1,
        "wgrad direct": 1,
    }
    assert lowered(row(ub_name="fc2"), 0, 1) == {
        "matmul_reduce_scatter pipeline 4": 1,
        "all_gather_matmul direct": 1,
        "wgrad direct": 1,
    }


def test_a_wgrad_that_was_configured_gathers_by_itself_where_no_dgrad_did():
    initialize(proj_wgrad={"method": "external"}, proj_dgrad={"method": "direct"})
    assert lowered(row(ub_name="proj"), 1)["all_gather external"] == 1
    assert lowered(row(ub_name="proj"), 0, 1)["all_gather external"] == 1
    ub.destroy_ub()
    initialize(proj_wgrad={"method": "direct"})
    assert lowered(row(ub_name="proj"), 1)["wgrad direct"] == 1


def test_free_names_and_full_names_are_found():
    initialize(
        mla_fprop={"comm_type": "AG", "method": "external"},
        head={"comm_type": "RS", "method": "ring_exchange"},
    )
    assert lowered(column(ub_name="mla"), 0)["all_gather_matmul external"] == 1
    assert lowered(row(ub_name="head"), 0)["matmul_reduce_scatter ring_exchange"] == 1
    assert lowered(column(ub_name="qkv_fprop"), 0)["bulk_all_gather bulk"] == 0
    assert lowered(column(ub_name="qkv_fprop"), 0, 1)["bulk_all_gather bulk"] == 1


def test_the_calls_own_method_comes_first():
    initialize()
    found = lowered(column(ub_name="qkv", method="direct"), 0, 1)
    assert found == {
        "all_gather_matmul direct": 1,
        "matmul_reduce_scatter direct": 1,
        "wgrad direct": 1,
    }


def test_the_name_comes_before_the_environment(monkeypatch):
    monkeypatch.setattr(settings, "method", lambda: "external")
    initialize(head={"comm_type": "RS", "method": "pipeline", "num_splits": 2})
    found = lowered(row(ub_name="head"), 0)
    # Only the forward pass of "head" is configured.
    assert found == {
        "matmul_reduce_scatter pipeline 2": 1,
        "all_gather_matmul external": 1,
    }
    assert lowered(row(), 0)["matmul_reduce_scatter external"] == 1


@covering(method=["ring_exchange", "xla", *nightly("pipeline", "external")])
def test_results_and_gradients_do_not_depend_on_the_configuration(method):
    initialize(
        qkv_fprop={"method": method},
        qkv_dgrad={"method": method},
        proj_fprop={"method": method},
        proj_dgrad={"method": method},
    )
    for layer, name in ((column, "qkv"), (row, "proj")):
        expected = with_gradients(layer(method="xla"), 0, 1)(*operands())
        assert_equal(with_gradients(layer(ub_name=name), 0, 1)(*operands()), expected)
        dw = with_gradients(layer(method="xla"), 1)(*operands())
        assert_equal(with_gradients(layer(ub_name=name), 1)(*operands()), dw)


def test_pairs_of_chunks_multiply_to_the_same_results():
    initialize(qkv_fprop={"aggregate": True}, proj_dgrad={"aggregate": True})
    for layer, name in ((column, "qkv"), (row, "proj")):
        actual = with_gradients(layer(ub_name=name), 0, 1)
        text = actual.lower(*operands()).as_text()
        assert len(re.findall(r"all_gather_matmul\(.*variant = 1", text)) == 1
        expected = with_gradients(layer(method="xla"), 0, 1)(*operands())
        assert_equal(actual(*operands()), expected)


def test_late_puts_give_the_same_results():
    late = {"method": "pipeline", "pipeline_rs_overlap_first_gemm": True}
    initialize(proj_fprop=late, qkv_dgrad=late)
    for layer, name in ((column, "qkv"), (row, "proj")):
        actual = with_gradients(layer(ub_name=name), 0, 1)
        text = actual.lower(*operands()).as_text()
        assert len(re.findall(r"matmul_reduce_scatter\(.*variant = 2", text)) == 1
        expected = with_gradients(layer(method="xla"), 0, 1)(*operands())
        assert_equal(actual(*operands()), expected)


def test_the_default_configuration_has_the_right_results():
    initialize()
    for layer, name in ((column, "fc1"), (row, "fc2")):
        for wanted in ((0, 1), (0,), (1,)):
            expected = with_gradients(layer(method="xla"), *wanted)(*operands())
            actual = with_gradients(layer(ub_name=name), *wanted)(*operands())
            assert_equal(actual, expected)


def test_a_name_is_a_mere_label_where_nothing_was_initialised():
    assert lowered(column(ub_name="anything"), 0)["all_gather_matmul direct"] == 1


def test_an_unknown_name_is_refused_once_its_axis_is_initialised():
    initialize()
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'qkv'?"):
        lowered(column(ub_name="qvk"), 0)
    with pytest.raises(ub.errors.UnknownNameError, match="no overlap 'qvk'"):
        lowered(column(ub_name="qvk", method="direct"), 0)
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'fc1'?"):
        lowered(column(ub_name="fc1_forward"), 0)
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'fc1_fprop'?"):
        ub.get_ub("fc1_forward")


def test_a_name_of_the_other_kind_is_refused():
    initialize()
    with pytest.raises(
        ub.errors.UnsupportedOverlapError,
        match="'proj_fprop' is configured for RS .*communicates AG",
    ):
        lowered(column(ub_name="proj"), 0)
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="communicates RS"):
        lowered(row(ub_name="qkv"), 0)
    assert lowered(column(ub_name="proj", method="direct"), 0)


def test_a_name_for_fp8_alone_does_not_serve_other_operands():
    ub.initialize_ub((64, 32), 4, use_fp8=True, mesh=tp_mesh(4))
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="FP8 buffers only"):
        lowered(column(ub_name="qkv"), 0)


@pytest.mark.parametrize("modes", [["NONE", "FP8"], ["FP8"], ["NONE"]])
def test_fp8_operands_use_the_overlaps_of_mode_fp8_if_there_are_any(modes):
    modes = [ub.UserBufferQuantizationMode[name] for name in modes]
    methods = {"NONE": "ring_exchange", "FP8": "external"}
    cfgs = [{"qkv_fprop": {"method": methods[mode.name]}} for mode in modes]
    ub.initialize_ub(
        (64, 32), 4, quantization_modes=modes, ub_cfgs=cfgs, mesh=tp_mesh(4)
    )

    def call(x, w, fp8):
        return ub.linear(
            x, w, parallel="column", axis_name="tp", ub_name="qkv", fp8=fp8
        )

    def method(fp8):
        specs = (P("tp"), P(None, "tp")), P(None, "tp")
        run = on_ranks(lambda x, w: call(x, w, fp8), tp_mesh(4), *specs)
        text = compiled_text(run, jnp.ones((8, 32)), jnp.ones((32, 8)))
        (line,) = call_lines(text)
        return int(line.split("method = ")[1].split(" ")[0])

    ring, external = Method.RING_EXCHANGE.code, Method.EXTERNAL.code
    names = [mode.name for mode in modes]
    assert method(ub.fp8.Float8CurrentScaling()) == (
        external if "FP8" in names else ring
    )
    if "NONE" in names:
        assert method(None) == ring


def test_a_name_does_not_serve_an_axis_of_another_size():
    ub.initialize_ub((64, 32), 8, mesh=tp_mesh(8))
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="4 ranks here.*for 8"):
        lowered(column(ub_name="qkv"), 0)
    assert lowered(column(), 0)["all_gather_matmul direct"] == 1


def test_a_layer_without_sequence_parallelism_runs_what_fits():
    def function(x, w):
        return ub.linear(
            x,
            w,
            parallel="column",
            axis_name="tp",
            sequence_parallel=False,
            ub_name="qkv",
        )

    layer = on_ranks(function, tp_mesh(4), (P(), P(None, "tp")), P(None, "tp"))
    initialize()
    with pytest.raises(ub.errors.UnsupportedOverlapError, match="dgrad of linear"):
        lowered(layer, 0)
    ub.destroy_ub()
    initialize(qkv_dgrad={"method": "pipeline", "num_splits": 2})
    assert lowered(layer, 0)["matmul_all_reduce pipeline 2"] == 1


def test_a_row_layer_without_sequence_parallelism_reduces_as_configured():
    def function(x, w):
        return ub.matmul_all_reduce(x, w, axis_name="tp", ub_name="proj")

    layer = on_ranks(function, tp_mesh(4), ROW, P())
    initialize(proj_fprop={"method": "ring_exchange"})
    assert lowered(layer, 0)["matmul_all_reduce ring_exchange"] == 1


def test_shape_is_the_capacity():
    initialize()
    x, w = operands()
    layer = column(ub_name="qkv")
    for rows in (4, 32, 64):
        layer(x[:rows], w)
    more = jnp.concatenate([x, x[:4]])
    with pytest.raises(
        ub.errors.ShapeContractError, match=r"initialize_ub\(shape=\(68, 32\)"
    ):
        layer(more, w)
    # In one process calls without a name need no buffers, as plain jax.lax does.
    column()(more, w)
    column(method="xla")(more, w)


def test_capacity_counts_elements_so_that_fewer_tokens_may_be_wider():
    initialize()
    column(ub_name="qkv")(jnp.ones((32, 64)), jnp.ones((64, 8)))
    with pytest.raises(
        ub.errors.ShapeContractError, match=r"initialize_ub\(shape=\(64, 64\)"
    ):
        column(ub_name="qkv")(jnp.ones((64, 64)), jnp.ones((64, 8)))


def test_the_width_of_a_scattered_result_counts():
    initialize()
    with pytest.raises(ub.errors.ShapeContractError, match="64 tokens of 36"):
        row(ub_name="proj")(jnp.ones((64, 16)), jnp.ones((16, 36)))
    row(ub_name="proj")(jnp.ones((64, 64)), jnp.ones((64, 32)))


def test_vmapped_calls_count_their_batch():
    initialize()

    def function(x, w):
        one = jax.vmap(
            lambda x: ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv")
        )
        return one(x)

    layer = on_ranks(
        function, tp_mesh(4), (P(None, "tp"), P(None, "tp")), P(None, None, "tp")
    )
    layer(jnp.ones((2, 32, 32)), jnp.ones((32, 8)))
    with pytest.raises(ub.errors.ShapeContractError, match="96 tokens of 32"):
        layer(jnp.ones((3, 32, 32)), jnp.ones((32, 8)))


def test_sums_without_a_name_need_no_buffers_in_one_process():
    initialize()
    function = on_ranks(
        lambda x: ub.all_reduce(x, axis_name="tp"), tp_mesh(4), P(), P()
    )
    assert_equal(function(jnp.ones((68, 32))), jnp.full((68, 32), 4.0))


def test_layers_that_overlap_named_keep_their_paths_as_labels():
    nnx = pytest.importorskip("flax.nnx")
    initialize()
    mesh = tp_mesh(4)
    with jax.set_mesh(mesh):
        model = nnx.Dict(up=nnx.Linear(32, 16, rngs=nnx.Rngs(0)))
    ub.overlap(model, rules={"up": "column"}, mesh=mesh)
    model["up"](jnp.ones((1, 64, 32)))


def test_xla_is_the_only_method_of_the_environment_that_replaces_a_name_s(monkeypatch):
    initialize(fc1_fprop={"method": "pipeline", "num_splits": 2})
    monkeypatch.setenv("JAX_UB_METHOD", "external")
    assert lowered(column(ub_name="fc1"), 0)["all_gather_matmul pipeline 2"] == 1
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    for layer in (column(ub_name="fc1"), column(ub_name="qkv"), row(ub_name="proj")):
        assert not lowered(layer, 0, 1)
    column(ub_name="qkv")(jnp.ones((68, 32)), jnp.ones((32, 16)))  # needs no buffers
    assert lowered(column(ub_name="fc1", method="direct"), 0)


BY_METHOD = ["direct", "ring_exchange", "pipeline", "external"]


@pytest.mark.parametrize("method", BY_METHOD)
def test_a_named_method_runs_every_part_that_communicates(method):
    for layer in (column, row):
        for wanted in ((0, 1), (0,), (1,)):
            found = lowered(layer(method=method), *wanted)
            used = {key.split()[1] for key in found if not key.startswith("wgrad")}
            assert used == {method}


@pytest.mark.parametrize("method", BY_METHOD)
def test_a_collective_without_a_gemm_runs_by_its_method(method):
    def function(x):
        y, _, _ = ops.AllGather("tp", method=method).forward({}, x, (), frozenset())
        z, _, _ = ops.ReduceScatter("tp", method=method).forward({}, y, (), frozenset())
        return z

    run = on_ranks(function, tp_mesh(4), P("tp"), P("tp"))
    x, _ = operands()
    found = re.findall(r"@jax_ub\$(\w+)\(.*?method = (\d)", run.lower(x).as_text())
    wanted = {("all_gather", method), ("reduce_scatter", method)}
    assert {(target, CODES[int(code)]) for target, code in found} == wanted
    assert_equal(run(x), 4 * x)


@pytest.mark.parametrize("layer", [column, row])
def test_bulk_is_refused_for_a_call_that_multiplies_what_it_communicates(
    layer, monkeypatch
):
    message = 'method = "bulk" communicates during .* Use "ring_exchange".*ub_cfgs='
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=message):
        lowered(layer(method="bulk"), 0)
    monkeypatch.setenv("JAX_UB_METHOD", "bulk")
    with pytest.raises(ub.errors.UnsupportedOverlapError, match='JAX_UB_METHOD = "bu'):
        lowered(layer(), 0)


def test_bulk_is_refused_for_an_operation_whatever_passes_it_to():
    error, match = ub.errors.UnsupportedOverlapError, '"bulk" communicates during'
    with pytest.raises(error, match=match):
        ops.BasicLinear(8, 8, tensor_parallel_mode="column", method="bulk")
    with pytest.raises(error, match=r'userbuffers_options\["method"\] = "bulk"'):
        ops.BasicLinear(8, 8, userbuffers_options={"comm_name": "a", "method": "bulk"})
    with pytest.raises(error, match=match):
        on_ranks(
            lambda dy, x, w: ops.fused.UserbuffersBackwardLinear.functional_backward(
                dy, x, w, tensor_parallel_mode="row", axis_name="tp", method="bulk"
            )[0],
            tp_mesh(4),
            (P("tp"), *ROW),
            P(None, "tp"),
        ).lower(jnp.ones((64, 16)), *operands())


def test_bulk_that_was_configured_is_refused_for_transposed_kernels():
    def function(x, w):
        return ub.all_gather_matmul(
            x, w, axis_name="tp", ub_name="qkv", rhs_transposed=True
        )

    layer = on_ranks(function, tp_mesh(4), (P("tp"), P("tp")), P(None, "tp"))
    x, w = operands()
    gradient = jax.jit(jax.grad(lambda x, w: layer(x, w).sum(), (0, 1)))
    initialize()
    # Transformer Engine's default is not an explicit method.
    assert "bulk" not in gradient.lower(x, w.T).as_text()
    ub.destroy_ub()
    initialize(qkv_dgrad={"method": "bulk"})
    gradient = jax.jit(jax.grad(lambda x, w: layer(x, w).sum(), (0, 1)))
    jax.clear_caches()
    with pytest.raises(ub.errors.UnsupportedOverlapError, match=r"kernel \[in, out\]"):
        gradient.lower(x, w.T)


def test_a_path_is_no_name_for_what_jax_has_traced():
    def function(x, w, name):
        return jax.shard_map(
            lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp", ub_name=name),
            mesh=tp_mesh(4),
            in_specs=COLUMN,
            out_specs=P(None, "tp"),
        )(x, w)

    initialize()
    run = jax.jit(function, static_argnums=2)
    run(*operands(), registry.LayerName("mylayer"))
    with pytest.raises(ub.errors.UnknownNameError, match="no overlap 'mylayer'"):
        run(*operands(), "mylayer")
    path = registry.LayerName("a")
    assert path == registry.LayerName("a") and path != "a" and path != "a"
    assert len({path, "a", registry.LayerName("a")}) == 2


@pytest.mark.parametrize("method", [None, "ring_exchange"])
def test_a_call_without_a_name_is_not_limited_where_no_buffers_are(method):
    ub.initialize_ub((16, 8), 4, dtype=jnp.float32, mesh=tp_mesh(4))
    x, w = operands()
    y, _ = with_gradients(column(method=method), 0, 1)(x, w)
    assert_equal(y, x @ w)
    with pytest.raises(ub.errors.ShapeContractError, match=r"64 tokens of 32 features"):
        lowered(column(ub_name="qkv"), 0)


def test_a_call_without_a_name_falls_back_where_buffers_are_too_small(monkeypatch):
    ub.initialize_ub((16, 8), 4, dtype=jnp.float32, mesh=tp_mesh(4))
    name = "jax_ub._src.runtime.communicators.DeviceGroups.any_spans_processes"
    monkeypatch.setattr(name, True)
    with pytest.warns(UserWarning, match=r"64 tokens of .*\(shape=\(64, 32\), .*xla"):
        assert not lowered(column(), 0)
    assert "64 tokens of 32 features" in ub.fallbacks()[-1].reason
    with pytest.raises(ub.errors.ShapeContractError, match="buffers of axis 'tp'"):
        lowered(column(method="ring_exchange"), 0)
