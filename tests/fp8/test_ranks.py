"""Scales per tensor are agreed over the ranks that share the tensor."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import whole
from operands import normal
from programs import (
    collectives,
    compiled_text,
    dp_tp_mesh,
    on_ranks,
    scale_calls,
    tp_mesh,
)

import jax_ub as ub
from jax_ub._src.runtime import cpu_engine

FP8 = ub.fp8
AMAXES = (1.0, 100.0, 1e4, 3.0)


def uneven(shape=(8, 32)):
    """Returns an array whose rows differ 10^4-fold between four ranks."""
    factors = np.repeat(AMAXES, shape[0] // 4)[:, None]
    return normal(0, shape) * jnp.asarray(factors, jnp.float32)


RECIPES = [
    FP8.Float8CurrentScaling(),
    FP8.Float8CurrentScaling(use_power_2_scales=True),
    FP8.RowwiseScaling(),
    FP8.MXFP8BlockScaling(),
]


@covering(recipe=RECIPES, role=["input", "output_grad"], check_vma=[True, False])
def test_ranks_get_the_values_of_one_rank_with_the_whole_tensor(
    recipe, role, check_vma
):
    def shard(x):
        q = ub.quantize(x, recipe, role=role, axis_name="tp")
        scales = jnp.broadcast_to(q.scales, (x.shape[0], q.scales.shape[1]))
        return q.values, scales

    function = on_ranks(shard, tp_mesh(4), P("tp"), P("tp"), check_vma=check_vma)
    x = uneven()
    values, scales = map(whole, function(x))
    wanted = ub.quantize(x, recipe, role=role)
    np.testing.assert_array_equal(values, wanted.values)
    np.testing.assert_array_equal(*jnp.broadcast_arrays(scales, wanted.scales))


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_delayed_scaling_agrees_on_the_state(reduce_amax):
    recipe = FP8.DelayedScaling(amax_history_len=2, reduce_amax=reduce_amax)

    def shard(x, state):
        def loss(state):
            q = ub.quantize(x, recipe, state=state, axis_name="tp")
            return jnp.sum(q.dequantize(jnp.float32))

        return FP8.apply_updates(state, jax.grad(loss)(state))

    function = on_ranks(shard, tp_mesh(4), (P("tp"), P()), P())
    x, state = uneven(), FP8.init_state(recipe)
    state = function(x, state)
    amax = float(np.max(np.abs(formulas.wide(x))))
    assert state["input_amax_history"].tolist() == [amax, 0.0]
    state = function(x, state)
    assert state["input_scale"] == np.float32(1) / (np.float32(448) / np.float32(amax))


@pytest.mark.parametrize(("num_replicas", "reduce_amax"), [(2, True), (1, False)])
def test_a_replicated_state_is_updated_through_shard_map(num_replicas, reduce_amax):
    recipe = FP8.DelayedScaling(amax_history_len=2, reduce_amax=reduce_amax)

    def shard(x, state):
        q = ub.quantize(x, recipe, state=state, axis_name="tp")
        return jax.lax.psum(jnp.sum(q.dequantize(jnp.float32)), ("dp", "tp"))

    mesh = dp_tp_mesh(num_replicas, 2)
    function = on_ranks(shard, mesh, (P(("dp", "tp")), P()), P())
    x, state = uneven(), FP8.init_state(recipe)
    new = FP8.apply_updates(state, jax.grad(lambda state: function(x, state))(state))
    amax = float(np.max(np.abs(formulas.wide(x))))
    assert new["input_amax_history"].tolist() == [amax, 0.0]


def test_replicas_reduce_the_state_themselves_without_check_vma():
    recipe = FP8.DelayedScaling(amax_history_len=2)

    def shard(x, state):
        def loss(state):
            q = ub.quantize(x, recipe, state=state, axis_name="tp")
            return jnp.sum(q.dequantize(jnp.float32))

        new = jax.grad(loss)(state)
        return new["input_amax_history"], jax.lax.pmax(new, "dp")["input_amax_history"]

    mesh, specs = dp_tp_mesh(2, 2), (P(("dp", "tp")), P())
    function = on_ranks(shard, mesh, specs, (P("dp"), P()), check_vma=False)
    x = uneven()
    per_replica, reduced = function(x, FP8.init_state(recipe))
    wide = np.abs(formulas.wide(x)).astype(np.float32)
    assert whole(per_replica).tolist() == [wide[:4].max(), 0, wide[4:].max(), 0]
    for shard in reduced.addressable_shards:
        assert shard.data.tolist() == [wide.max(), 0]


def test_an_amax_that_is_not_reduced_needs_a_state_per_group():
    recipe = FP8.DelayedScaling(amax_history_len=2, reduce_amax=False)

    def shard(x, state):
        return ub.quantize(x, recipe, state=state, axis_name="tp").values

    def layer(x, state):
        options = {"axis_name": "tp", "fp8": recipe, "fp8_state": state}
        return ub.all_gather_matmul(x, jnp.ones((x.shape[1], 2)), **options)

    for function, op in ((shard, "quantize"), (layer, "all_gather_matmul")):
        on_mesh = on_ranks(
            function, dp_tp_mesh(2, 2), (P(("dp", "tp")), P()), P(("dp", "tp"))
        )
        with pytest.raises(
            ub.errors.ConfigurationError,
            match=op
            + r": .* the amax differs over \('dp',\), but .* in front of jax.grad",
        ):
            on_mesh(uneven(), FP8.init_state(recipe))

    def with_own_state(x, state):
        state = jax.lax.pcast(state, "dp", to="varying")

        def loss(state):
            quantized = ub.quantize(x, recipe, state=state, axis_name="tp")
            return jnp.sum(quantized.dequantize(jnp.float32))

        return jax.grad(loss)(state)["input_amax_history"]

    wide = np.abs(uneven())
    on_mesh = on_ranks(
        with_own_state, dp_tp_mesh(2, 2), (P(("dp", "tp")), P()), P("dp")
    )
    histories = whole(on_mesh(uneven(), FP8.init_state(recipe)))
    half = len(wide) // 2
    assert histories.tolist() == [wide[:half].max(), 0, wide[half:].max(), 0]


def test_a_nan_of_one_rank_reaches_all():
    def shard(x):
        return ub.quantize(x, axis_name="tp").scales

    function = on_ranks(shard, tp_mesh(4), P("tp"), P())
    assert function(uneven().at[3, 3].set(jnp.nan)) == 1.0


def test_a_tensor_costs_one_collective_and_all_kernels_together_one():
    mesh = tp_mesh(4)

    def one(x):
        return ub.quantize(x, axis_name="tp").values

    def params(ws):
        quantized = FP8.quantize_params(ws, axis_name="tp")
        return jax.tree.map(lambda w: w.values, quantized, is_leaf=is_scaled)

    def is_scaled(leaf):
        return isinstance(leaf, ub.ScaledArray)

    x = uneven()
    ws = {"a": x, "b": x * 3, "c": normal(1, (4, 8))}
    for function, values in ((one, x), (params, ws)):
        compiled = on_ranks(function, mesh, P("tp"), P("tp"))
        text = compiled.lower(values).compile().as_text()
        assert not collectives(text)
        assert scale_calls(text) == 1
    found = on_ranks(params, mesh, P("tp"), P("tp"))(ws)
    for name, w in ws.items():
        expected = ub.quantize(w, role="kernel").values
        np.testing.assert_array_equal(whole(found[name]), expected)


@pytest.mark.parametrize("case", ["method", "automatic axis", "vmap"])
def test_jax_agrees_on_the_scale_where_the_engine_cannot_run(case, monkeypatch):
    def scale(x):
        return ub.quantize(x, axis_name="tp").scales

    x = uneven()
    options = {"in_specs": P("tp"), "out_specs": P()}
    if case == "method":
        monkeypatch.setenv("JAX_UB_METHOD", "xla")
        function = jax.jit(jax.shard_map(scale, mesh=tp_mesh(4), **options))
    elif case == "automatic axis":
        mesh = dp_tp_mesh(2, 4)
        options["axis_names"] = {"tp"}
        function = jax.jit(jax.shard_map(scale, mesh=mesh, **options))
    else:
        ranks = jax.vmap(scale, axis_name="tp")

        def function(x):
            return ranks(x.reshape(4, -1, x.shape[1]))[0]

        function = jax.jit(function)
    assert scale_calls(compiled_text(function, x)) == 0
    np.testing.assert_array_equal(function(x), ub.quantize(x).scales)


@pytest.mark.parametrize("case", ["no engine", "platforms"])
def test_a_scale_that_jax_agrees_on_is_no_fallback(case, monkeypatch):
    def scale(x):
        return ub.quantize(x, axis_name="tp").scales

    x = uneven()
    function = on_ranks(scale, tp_mesh(4), P("tp"), P())
    if case == "no engine":
        monkeypatch.setattr(cpu_engine, "why_not", lambda: "there is no engine")
    else:
        export = jax.export.export(function, platforms=["cpu", "cuda"])
        function = jax.jit(export(x).call)
        x = jax.device_put(x, NamedSharding(tp_mesh(4), P("tp")))
    ub.fallbacks(clear=True)
    assert scale_calls(compiled_text(function, x)) == 0
    np.testing.assert_array_equal(function(x), ub.quantize(uneven()).scales)
    assert not ub.fallbacks()


@pytest.mark.parametrize("recipe", RECIPES[2:])
def test_scales_of_rows_and_blocks_need_no_collective(recipe):
    function = on_ranks(
        lambda x: ub.quantize(x, recipe, axis_name="tp").values,
        tp_mesh(4),
        P("tp"),
        P("tp"),
    )
    assert not collectives(function.lower(uneven()).compile().as_text())
