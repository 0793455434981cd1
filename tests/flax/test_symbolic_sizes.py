"""Layers in programs of `jax.export` that hold for any number of sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import assert_trees_close, mesh_of, random_layer, random_variables
from operands import normal
from scaled_operands import DEFAULT_RECIPES as RECIPES

import jax_ub as ub
from jax_ub.flax import Linear, MultiHeadAttention, TransformerLayer, linen

refused = functools.partial(pytest.raises, ub.errors.UnsupportedOverlapError)


def exported(run, operands, sizes="batch, 8, 16"):
    """Exports `run` for an x of symbolic sizes, compiles and calls it."""
    *others, x = operands
    shape = jax.export.symbolic_shape(sizes)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), others
    )
    program = jax.export.export(jax.jit(run), disabled_checks=ub.export_safety_checks)(
        *shapes, jax.ShapeDtypeStruct(shape, x.dtype)
    )
    assert "@jax_ub$" not in program.mlir_module()
    assert "is exported with symbolic sizes" in ub.fallbacks()[-1].reason
    return jax.jit(program.call)(*others, np.asarray(x))


def of_state(model):
    """Returns a function of a model's state and inputs, and the state."""
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


@covering(parallel=["column", "row", None], sizes=["batch, 8, 16", "batch, tokens, 16"])
def test_a_layer_is_exported_for_any_size(parallel, sizes):
    x, flax = normal(0, (4, 8, 16)), random_layer(nnx.Linear, 16, 32)
    with jax.set_mesh(mesh_of(2, 2)):
        model = random_layer(Linear, 16, 32, parallel=parallel)
        model.bias[...] += 1
        run, state = of_state(model)
        y = exported(run, (state, x), sizes)
    assert_trees_close(y, flax(x) + 1)


def test_kernels_that_share_an_fp8_state_are_exported():
    x, recipe = normal(0, (4, 8, 32)), ub.fp8.DelayedScaling(amax_history_len=2)
    with jax.set_mesh(mesh_of(2, 2)):
        model = MultiHeadAttention(2, 32, rngs=nnx.Rngs(0), fp8=recipe)
        # The query's scale of the kernels clips all of them.
        model.query.fp8_state.kernel_amax_history[...] += 1e-3
        run, state = of_state(model)
        wanted = jax.jit(run)(state, x)
        y = exported(run, (state, x), "batch, 8, 32")
    assert float(jnp.max(jnp.abs(wanted))) < 0.1
    assert_trees_close(y, wanted)


@pytest.mark.parametrize("recipe", ["delayed", *nightly("current")])
@pytest.mark.parametrize("main_grad", [True, *nightly(False)])
def test_gradients_and_states_of_kernels_that_share_a_scale_are_exported(
    recipe, main_grad
):
    x = normal(0, (4, 8, 32))
    options = {"fp8": RECIPES[recipe], "main_grad": main_grad}
    with jax.set_mesh(mesh_of(1, 2)):
        model = random_layer(MultiHeadAttention, 2, 32, **options)
        # Key and value have larger kernels and gradients than the query.
        model.value.kernel[...] *= 4
        apply, state = of_state(model)
        run = jax.jit(jax.grad(lambda state, x: jnp.sum(apply(state, x) ** 2), (0, 1)))
        found, wanted = exported(run, (state, x), "batch, 8, 32"), run(state, x)
    assert_trees_close(found, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("parallel", ["column", *nightly("row")])
@pytest.mark.parametrize("recipe", ["block", *nightly("row")])
def test_gradients_with_scales_of_blocks_and_rows_are_exported(parallel, recipe):
    x = normal(0, (4, 8, 64))
    options = {"parallel": parallel, "fp8": RECIPES[recipe]}
    with jax.set_mesh(mesh_of(2, 2)):
        model = random_layer(Linear, 64, 64, **options)
        apply, state = of_state(model)
        run = jax.jit(jax.grad(lambda state, x: jnp.sum(apply(state, x) ** 2), (0, 1)))
        found, wanted = exported(run, (state, x), "batch, 8, 64"), run(state, x)
    assert_trees_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_gradients_are_exported_and_main_grads_accumulate():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        model = random_layer(Linear, 16, 16, parallel="row", main_grad=True)
        model.main_grad[...] += 1
        apply, state = of_state(model)

        def gradients(state, x):
            def loss(state):
                graph = nnx.graphdef(model)
                return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, residual=x)))

            return jax.grad(loss)(state)

        found = exported(gradients, (state, x))
        expected = jax.jit(gradients)(state, x)
    assert_trees_close(found, expected)


@pytest.mark.parametrize("options", [{}, *nightly({"sequence_parallel": False})])
def test_a_transformer_layer_is_exported_for_any_batch(options):
    x = normal(0, (4, 8, 16))
    options = {"rotary_base": 1e4, "activation": "swiglu", **options}
    with jax.set_mesh(mesh_of(2, 2)):
        model = random_layer(TransformerLayer, 16, 32, 4, **options)
        run, state = of_state(model)
        found, expected = exported(run, (state, x)), jax.jit(run)(state, x)
        assert_trees_close(found, expected, atol=1e-4)

        module = linen.TransformerLayer(16, 32, 4, **options)
        params = random_variables(module, x)
        found = exported(module.apply, (params, x))
        assert_trees_close(found, jax.jit(module.apply)(params, x), atol=1e-4)


def test_symbolic_sizes_reject_explicit_methods_and_meshes():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        named = random_layer(Linear, 16, 16, parallel="row", method="direct")
        run, state = of_state(named)
        with refused(match="row.*symbolic sizes.*shard_map; export.*out the method."):
            exported(run, (state, x))
    with jax.set_mesh(mesh_of(2, 2, "explicit")):
        run, state = of_state(random_layer(Linear, 16, 16, parallel="row"))
        with refused(
            match=r"row.*x \(batch, 8, 16\) is exported with symbolic sizes, which jax "
            "cannot find on an explicit mesh; export it once for each size, or use"
        ):
            exported(run, (state, x))
