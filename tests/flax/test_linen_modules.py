"""linen modules of several linear layers, compared with modules of Flax."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from covering import covering, nightly
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict
from flax_models import (
    assert_trees_close,
    constant_init,
    linen_specs,
    mesh_of,
    random_variables,
)
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub.flax import linen

X = (4, 8, 16)


class NormedLinear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="linear")(nn.RMSNorm(name="norm")(x))


class NormedMLP(nn.Module):
    gated: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        up = nn.Dense(32, name="fc1")(y)
        if self.gated:
            up = nn.silu(nn.Dense(32, name="gate")(y)) * up
        return nn.Dense(16, name="fc2")(up if self.gated else nn.gelu(up))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        causal = jnp.tri(x.shape[-2], dtype=bool)
        y = nn.LayerNorm(name="attention_norm")(x)
        attention = nn.MultiHeadDotProductAttention(
            4, normalize_qk=True, name="attention"
        )
        x = x + attention(y, mask=causal)
        return x + NormedMLP(name="mlp")(x)


# A module of jax_ub and one of Flax with the same parameters.
PAIRS = {
    "linear": (linen.Linear((4, 8), parallel="column"), nn.DenseGeneral((4, 8))),
    "norm and linear": (
        linen.LayerNormLinear(32, normalization="RMSNorm", parallel="column"),
        NormedLinear(),
    ),
    "norm and MLP": (linen.LayerNormMLP(16, 32), NormedMLP()),
    "norm and gated MLP": (
        linen.LayerNormMLP(16, 32, activation="swiglu"),
        NormedMLP(gated=True),
    ),
    "attention": (
        linen.MultiHeadAttention(4, 32, 24, use_bias=False),
        nn.MultiHeadDotProductAttention(
            4, qkv_features=32, out_features=24, use_bias=False
        ),
    ),
    "layer": (linen.TransformerLayer(16, 32, 4, normalize_qk=True), Layer()),
}

# A layer has attention and an MLP.
SAMPLE = ["linear", "norm and linear", "layer"]
SAMPLE += nightly("norm and MLP", "norm and gated MLP", "attention")


def loss(module):
    return lambda variables, x: jnp.sum(jnp.sin(module.apply(variables, x)))


def gradients_of(apply):
    """Returns a function that computes loss, result and gradients."""

    def loss(variables, x):
        y = apply(variables, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("name", SAMPLE)
def test_parameters_equal_those_of_flax(name):
    # linen models are often initialized with a dummy input of one token.
    x, (ours, flax) = jnp.ones((1, 1, 16)), PAIRS[name]
    y, variables = ours.init_with_output(jax.random.key(3), x)
    expected_y, expected = flax.init_with_output(jax.random.key(3), x)
    assert (y.shape, y.dtype) == (expected_y.shape, expected_y.dtype)
    assert_trees_close(y, expected_y)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    assert_equal(variables, expected)


def test_parameters_equal_those_of_flax_on_an_explicit_mesh():
    x, (ours, flax) = jnp.ones((1, 1, 16)), PAIRS["norm and MLP"]
    with jax.set_mesh(mesh_of(2, 2, "explicit")):
        both = jax.jit(lambda key: (ours.init(key, x), flax.init(key, x)))
        assert_equal(*both(jax.random.key(3)))


@pytest.mark.parametrize("name", ["layer", *nightly(*list(PAIRS)[:5])])
@pytest.mark.parametrize(
    "layout", [("explicit", P(("dp", "tp"))), *nightly(("auto", P("dp")))]
)
def test_init_and_apply_return_the_same(name, layout):
    ours = dataclasses.replace(PAIRS[name][0], kernel_init=constant_init)
    types, layout = layout
    with jax.set_mesh(mesh_of(2, 2, types)):
        x = jax.device_put(normal(0, X), layout)
        y, variables = jax.jit(ours.init_with_output)(jax.random.key(3), x)
        assert_trees_close(y, jax.jit(ours.apply)(variables, x))


def test_init_takes_inputs_of_any_number_of_tokens():
    x = normal(0, (3, 5, 16))  # neither sequences nor tokens divide
    ours = linen.TransformerLayer(
        16,
        32,
        4,
        normalize_qk=True,
        data_axes=("dp",),
        main_grad=True,
        kernel_init=constant_init,
    )
    with jax.set_mesh(mesh_of(2, 2)):
        y, variables = jax.jit(ours.init_with_output)(jax.random.key(3), x)
        with pytest.raises(ub.errors.ShapeContractError, match="5 tokens"):
            jax.eval_shape(ours.apply, variables, x)
    expected = jax.jit(Layer().apply)({"params": variables["params"]}, x)
    assert_trees_close(y, expected)


@covering(name=SAMPLE, types=["explicit", "auto"])
def test_values_and_gradients_equal_those_of_flax(name, types):
    x, (ours, flax) = normal(0, X), PAIRS[name]
    variables = random_variables(flax, x)
    with jax.set_mesh(mesh_of(2, 2, types)):
        (value, y), gradients = gradients_of(ours.apply)(variables, x)
    (expected, expected_y), of_flax = gradients_of(flax.apply)(variables, x)
    assert_trees_close(value, expected, rtol=1e-4)
    assert_trees_close(y, expected_y, rtol=1e-4)
    assert_trees_close(gradients, of_flax, rtol=1e-4)


def test_a_transformer_layer_compiles_to_four_calls_and_no_other_communication():
    layer = linen.TransformerLayer(16, 32, 4, activation="swiglu", rotary_base=100.0)
    variables = random_variables(layer, jnp.ones(X))
    with jax.set_mesh(mesh_of(2, 2)):
        x = jax.device_put(normal(0, X), P("dp", "tp"))
        specs = jax.tree.map(lambda _: P(), variables)
        variables = jax.device_put(variables, specs)
        text = compiled_text(jax.jit(layer.apply), variables, x)
    assert calls(text) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
    assert not collectives(text)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_calls_run_as_initialize_ub_configured_their_names(sequence_parallel):
    mesh = mesh_of(1, 4)
    pipeline = {"method": "pipeline", "num_splits": 2}
    ub_cfgs = {"proj_fprop": pipeline}
    ub.initialize_ub((64, 16), 4, dtype=jnp.float32, ub_cfgs=ub_cfgs, mesh=mesh)
    layer = linen.TransformerLayer(
        16, 32, 4, mesh=mesh, sequence_parallel=sequence_parallel
    )
    x = jnp.ones((2, 32, 16))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    text = jax.jit(layer.apply).lower(variables, x).as_text()
    splits = re.findall(r"matmul_reduce_scatter\(.*num_splits = (\d)", text)
    # proj, and fc2 by default. All-reduces have no names.
    assert splits == (["2", "4"] if sequence_parallel else [])


@pytest.mark.parametrize("sequence_parallel", [True, *nightly(False)])
def test_inside_shard_map_a_layer_has_its_ranks_heads_and_features(sequence_parallel):
    x, flax = normal(0, X), Layer()
    ours = linen.TransformerLayer(
        16, 32, 4, normalize_qk=True, sequence_parallel=sequence_parallel
    )
    variables = random_variables(flax, x)
    tokens = P("dp", "tp" if sequence_parallel else None)
    run = jax.shard_map(
        ours.apply,
        mesh=mesh_of(2, 2),
        in_specs=(linen_specs(variables), tokens),
        out_specs=tokens,
    )

    (_, y), found = gradients_of(run)(variables, x)
    (_, expected_y), expected = gradients_of(flax.apply)(variables, x)
    assert_trees_close(y, expected_y)
    assert_trees_close(found, expected, rtol=1e-4)


def test_inside_shard_map_parameters_are_created_as_shards():
    layer = linen.TransformerLayer(16, 32, 4, main_grad=True)
    x = normal(0, X)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    create = jax.shard_map(
        lambda x: layer.init(jax.random.key(0), x),
        mesh=mesh_of(2, 2),
        in_specs=P("dp", "tp"),
        out_specs=linen_specs(shapes),
        check_vma=False,
    )
    assert_equal_shapes(jax.eval_shape(create, x), shapes)


def test_inside_shard_map_init_returns_zeros():
    layer = linen.MultiHeadAttention(4)
    x = normal(0, X)
    y = jax.jit(
        jax.shard_map(
            lambda x: layer.init_with_output(jax.random.key(0), x)[0],
            mesh=mesh_of(1, 2),
            in_specs=P(None, "tp"),
            out_specs=P(None, "tp"),
            check_vma=False,
        )
    )(x)
    assert_equal(y, jnp.zeros(X))


def scanned_twice(layer, x):
    scanned = nn.scan(
        lambda layer, x, _: (layer(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
    )
    return scanned(layer, x, None)[0]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_inside_shard_map_init_returns_the_type_that_apply_returns(sequence_parallel):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = linen.TransformerLayer(
                16, 32, 4, fsdp_axes="dp", sequence_parallel=sequence_parallel
            )
            return scanned_twice(layer, x)

    def create_and_apply(x):
        y, variables = Stack().init_with_output(jax.random.key(0), x)
        assert jax.typeof(y) == jax.typeof(Stack().apply(variables, x))
        return y

    tokens = P("dp", "tp" if sequence_parallel else None)
    y = jax.shard_map(
        create_and_apply, mesh=mesh_of(2, 2), in_specs=tokens, out_specs=tokens
    )
    assert jax.eval_shape(y, normal(0, X)).shape == X


def assert_equal_shapes(actual, expected):
    assert jax.tree.map(jnp.shape, actual) == jax.tree.map(jnp.shape, expected)


def test_other_inputs_are_attended_to():
    x, memory, values = (normal(i, (4, 4 + 4 * i, 16)) for i in (0, 1, 1))
    values = values + 1
    ours, flax = linen.MultiHeadAttention(4), nn.MultiHeadDotProductAttention(4)
    mask = jnp.asarray(normal(2, (4, 1, 4, 8)) > 0) | (jnp.arange(8) == 0)
    variables = random_variables(flax, x)
    for inputs, gathers in (((x, memory), 2), ((x, memory, values), 3)):
        with jax.set_mesh(mesh_of(1, 2)):
            run = jax.jit(functools.partial(ours.apply, mask=mask))
            y, text = run(variables, *inputs), compiled_text(run, variables, *inputs)
        assert calls(text)["all_gather_matmul"] == gathers
        assert_trees_close(y, flax.apply(variables, *inputs, mask=mask))


def test_a_kernel_of_heads_may_have_partitioning_metadata_of_linen():
    names = (None, "tp", None)
    init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    layer = linen.Linear((4, 8), parallel="column", kernel_init=init)
    with jax.set_mesh(mesh_of(2, 2)):
        variables = layer.init(jax.random.key(0), jnp.ones(X))
    assert nn.get_partition_spec(variables)["params"]["kernel"] == P(*names)
    expected = nn.DenseGeneral((4, 8)).init(jax.random.key(0), jnp.ones(X))
    assert_equal(nn.unbox(variables), expected)


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_stacked_layers_are_scanned_and_recomputed(types):
    def stack(kind, *args):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                return scanned_twice(nn.remat(kind)(*args, name="layer"), x)

        return Stack()

    x = normal(0, X)
    ours, flax = stack(linen.LayerNormMLP, 16, 32), stack(NormedMLP)
    variables = random_variables(flax, x)
    with jax.set_mesh(mesh_of(2, 2, types)):
        gradients = jax.jit(jax.grad(loss(ours)))(
            variables, jax.device_put(x, P("dp", "tp"))
        )
    expected = jax.jit(jax.grad(loss(flax)))(variables, x)
    assert_trees_close(gradients, expected, rtol=1e-4)


def test_every_kernel_has_an_accumulator():
    x = normal(0, X)
    ours = linen.TransformerLayer(16, 32, 4, main_grad=True, activation="swiglu")
    plain = dataclasses.replace(ours, main_grad=False)
    with jax.set_mesh(mesh_of(2, 2)):
        variables = random_variables(ours, x)
        params, main_grads = variables["params"], variables[OVERWRITE_WITH_GRADIENT]
        ones = jax.tree.map(jnp.ones_like, main_grads)
        given = {"params": params, OVERWRITE_WITH_GRADIENT: ones}
        gradients = jax.jit(jax.grad(loss(ours)))(given, x)
        expected = jax.jit(jax.grad(loss(plain)))({"params": params}, x)["params"]
    found = flatten_dict(gradients[OVERWRITE_WITH_GRADIENT])
    assert len(found) == 7
    expected, zeros = flatten_dict(expected), flatten_dict(gradients["params"])
    for path, main_grad in found.items():
        kernel = (*path[:-1], "kernel")
        assert_trees_close(main_grad, expected[kernel] + 1, rtol=1e-4)
        assert not zeros[kernel].any()
