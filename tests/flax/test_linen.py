import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax_models import assert_trees_close, mesh_of, random_variables
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, compiled_text

import jax_ub as ub
from jax_ub.flax import linen


def loss(layer):
    return lambda variables, x: jnp.sum(jnp.sin(layer.apply(variables, x)))


@pytest.mark.parametrize("parallel", ["column", "row", None])
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_equal_those_of_dense(parallel, use_bias):
    ours = linen.Linear(32, use_bias=use_bias, parallel=parallel)
    dense = nn.Dense(32, use_bias=use_bias)
    # linen models are often initialized with a dummy input of one token.
    ours, dense = (
        layer.init(jax.random.key(0), jnp.ones((1, 16))) for layer in (ours, dense)
    )
    assert jax.tree.structure(ours) == jax.tree.structure(dense)
    assert_equal(ours, dense)


@pytest.mark.parametrize(
    ("types", "parallel", "sequence_parallel"),
    [("auto", "column", True), ("explicit", "row", True), ("auto", "row", False)],
)
def test_values_and_gradients_equal_those_of_dense(types, parallel, sequence_parallel):
    x, dense = normal(0, (4, 8, 16)), nn.Dense(32)
    variables = random_variables(dense, x)
    ours = linen.Linear(32, parallel=parallel, sequence_parallel=sequence_parallel)
    with jax.set_mesh(mesh_of(2, 2, types)):
        value, gradients = jax.jit(jax.value_and_grad(loss(ours)))(variables, x)
    expected = jax.value_and_grad(loss(dense))(variables, x)
    assert_trees_close(value, expected[0], rtol=1e-4)
    assert_trees_close(gradients, expected[1])


def test_inside_shard_map_a_layer_works_on_shards():
    x, dense = normal(0, (4, 8, 16)), nn.Dense(32)
    variables = random_variables(dense, x)
    ours = linen.Linear(32, parallel="column")
    specs = {"params": {"kernel": P(None, "tp"), "bias": P("tp")}}
    y = jax.jit(
        jax.shard_map(
            ours.apply,
            mesh=mesh_of(2, 2),
            in_specs=(specs, P("dp", "tp")),
            out_specs=P("dp", None, "tp"),
        )
    )(variables, x)
    assert_trees_close(y, dense.apply(variables, x))


@pytest.mark.parametrize("parallel", ["column", "row", None])
def test_a_fallback_of_the_initialization_names_the_layer(parallel):
    layer = linen.Linear(32, parallel=parallel, ub_name="fc1")
    ub.fallbacks(clear=True)
    with jax.set_mesh(mesh_of(2, 1)):
        layer.init(jax.random.key(0), jnp.ones((1, 8, 16)))
    (note,) = ub.fallbacks()
    assert note.label == f"linear(parallel={parallel!r}) (ub_name 'fc1')"
    assert note.reason.startswith("x (1, 8, 16) has 1 examples")


def test_a_kernel_may_have_partitioning_metadata_of_linen():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp"))
    layer = linen.Linear(32, parallel="column", kernel_init=init)
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(2, 2)):
        variables = layer.init(jax.random.key(0), x)
        specs = nn.get_partition_spec(variables)
        assert specs["params"]["kernel"] == P(None, "tp")
        text = compiled_text(jax.jit(layer.apply), variables, x)
    assert calls(text) == {"all_gather_matmul": 1}


def test_indivisible_features_are_rejected():
    layer = linen.Linear(6, parallel="column")
    variables = layer.init(jax.random.key(0), jnp.ones((1, 16)))
    with (
        jax.set_mesh(mesh_of(1, 4)),
        pytest.raises(
            ub.errors.ShapeContractError, match=r"6 out features.*4 ranks.*Use 8"
        ),
    ):
        layer.apply(variables, jnp.ones((4, 16)))
