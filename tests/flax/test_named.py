"""Layers with a `ub_name` run as configured in `initialize_ub`."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from flax_models import Block, mesh_of, random_variables

import jax_ub as ub
from jax_ub.flax import Linear
from jax_ub.flax import linen as ub_linen

X = (2, 16, 16)  # with a batch axis
PIPELINE = {"method": "pipeline", "num_splits": 2}


def methods_in(function, *operands):
    """Counts calls by target, method code and number of splits."""
    text = jax.jit(function).lower(*operands).as_text()
    found = re.findall(r"@jax_ub\$(\w+)\(.*?method = (\d)[^}]*?num_splits = (\d)", text)
    return collections.Counter(found)


EXPECTED = {
    # fc1: ring_exchange forward, bulk backward; fc2: pipeline forward, ring backward.
    ("all_gather_matmul", "1", "0"): 2,
    ("bulk_all_gather", "3", "0"): 1,
    ("bulk_reduce_scatter", "3", "0"): 1,
    ("matmul_reduce_scatter", "2", "2"): 1,
    ("wgrad", "0", "0"): 1,
}


def initialize(mesh):
    ub.initialize_ub(
        (64, 16), 4, dtype=jnp.float32, ub_cfgs={"fc2_fprop": PIPELINE}, mesh=mesh
    )


def test_nnx_layers_are_found_by_their_names():
    mesh = mesh_of(1, 4)
    initialize(mesh)
    options = {"mesh": mesh, "use_bias": False}
    model = Block(
        lambda rngs: Linear(
            16, 32, parallel="column", ub_name="fc1", rngs=rngs, **options
        ),
        lambda rngs: Linear(
            32, 16, parallel="row", ub_name="fc2", rngs=rngs, **options
        ),
        nnx.Rngs(0),
    )
    graph, state = nnx.split(model)

    def loss(state, x):
        return nnx.merge(graph, state)(x).sum()

    assert (
        methods_in(jax.value_and_grad(loss, argnums=(0, 1)), state, jnp.ones(X))
        == EXPECTED
    )


def test_linen_layers_are_found_by_their_names():
    mesh = mesh_of(1, 4)
    initialize(mesh)

    class Pair(linen.Module):
        @linen.compact
        def __call__(self, x):
            options = {"mesh": mesh, "use_bias": False}
            x = ub_linen.Linear(32, parallel="column", ub_name="fc1", **options)(x)
            return ub_linen.Linear(16, parallel="row", ub_name="fc2", **options)(x)

    model = Pair()
    variables = random_variables(model, jnp.ones(X))

    def loss(variables, x):
        return model.apply(variables, x).sum()

    found = methods_in(jax.value_and_grad(loss, argnums=(0, 1)), variables, jnp.ones(X))
    assert found == EXPECTED


def test_a_traced_layer_is_traced_again_after_a_new_configuration(monkeypatch):
    mesh = mesh_of(1, 4)
    options = {"mesh": mesh, "use_bias": False, "rngs": nnx.Rngs(0)}
    layer = Linear(32, 16, parallel="row", ub_name="fc2", **options)

    def found():
        # Each call traces a new function, because jax.jit caches programs.
        return methods_in(lambda x: layer(x), jnp.ones((2, 16, 32)))

    before = found()
    monkeypatch.setenv("JAX_UB_METHOD", "ring_exchange")
    assert found() == {("matmul_reduce_scatter", "1", "0"): 1} != before
    initialize(mesh)
    assert found() == {("matmul_reduce_scatter", "2", "2"): 1}
    ub.destroy_ub()
    monkeypatch.delenv("JAX_UB_METHOD")
    assert found() == before


def test_a_misspelt_layer_name_is_rejected():
    mesh = mesh_of(1, 4)
    initialize(mesh)
    layer = Linear(
        16, 32, parallel="column", ub_name="fc_1", mesh=mesh, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'fc1'"):
        layer(jnp.ones(X))


def test_layers_of_existing_models_are_configured_by_ub_names():
    mesh = mesh_of(1, 4)
    initialize(mesh)
    layer = linen.Dense(
        32,
        use_bias=False,
        dot_general=ub.dot_general("column", mesh=mesh, ub_name="fc1"),
    )
    variables = random_variables(layer, jnp.ones(X))
    found = methods_in(layer.apply, variables, jnp.ones(X))
    assert found == {("all_gather_matmul", "1", "0"): 1}
