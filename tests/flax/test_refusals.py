import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import mesh_of
from jax.sharding import PartitionSpec as P

from jax_ub.errors import ShapeContractError, UnknownNameError
from jax_ub.flax import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiHeadAttention,
    TransformerLayer,
)


def layer(*sizes, parallel="column", **options):
    return Linear(*sizes or (16, 32), parallel=parallel, rngs=nnx.Rngs(0), **options)


def attention(*sizes, **options):
    return MultiHeadAttention(*sizes or (4, 16), rngs=nnx.Rngs(0), **options)


def transformer(*sizes, **options):
    return TransformerLayer(*sizes or (16, 32, 4), rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: layer(16, 30),
            ShapeContractError,
            "linear(parallel='column'): the kernel has 30 out features, which do not "
            "divide into the 4 ranks of mesh axis 'tp'. Use 32, or do not shard",
        ),
        (
            lambda: layer(18, 32, parallel="row", ub_name="proj"),
            ShapeContractError,
            "linear(parallel='row') (ub_name 'proj'): the kernel has 18 in features",
        ),
        (
            lambda: layer(axis_name="tpp"),
            UnknownNameError,
            "axis_name = 'tpp' is not an axis of the mesh {'dp': 2, 'tp': 4}. Did you "
            "mean 'tp'?",
        ),
        (
            lambda: layer(parallel="colum"),
            UnknownNameError,
            "parallel = 'colum' is not a way to shard a kernel. Did you mean 'column'?",
        ),
        (
            lambda: layer(mesh=4),
            ShapeContractError,
            "linear(parallel='column'): mesh = 4 is of type int. Pass a jax.sharding.M",
        ),
        (
            lambda: layer(axis_name=None),
            ShapeContractError,
            "linear(parallel='column'): axis_name = None is not the name of a mesh",
        ),
        (
            lambda: layer(axis_name=("tp", "tp")),
            ShapeContractError,
            "axis_name = ('tp', 'tp') names a mesh axis twice. Name each once.",
        ),
        (
            lambda: layer(data_axes=3),
            ShapeContractError,
            "data_axes = 3 are not names of mesh axes. Pass a tuple of them, for exam",
        ),
        (
            lambda: layer(data_axes=("dp", "tp")),
            ShapeContractError,
            "linear(parallel='column'): data_axes = ('dp', 'tp') has axis_name = 'tp', "
            "whose ranks share the tokens and features of the same examples. Pass "
            "data_axes=('dp',), or another axis_name.",
        ),
        (lambda: layer(data_axes="tp"), ShapeContractError, "Pass data_axes=(), or an"),
        (
            lambda: layer(data_axes=("dp", "dp")),
            ShapeContractError,
            "data_axes = ('dp', 'dp') names a mesh axis twice. Name each once.",
        ),
        (
            lambda: transformer(hidden_dropout="0.1"),
            ShapeContractError,
            "TransformerLayer: hidden_dropout = '0.1' is not a "
            "probability. Pass a number",
        ),
        (
            lambda: transformer(attention_dropout=1.5),
            ShapeContractError,
            "TransformerLayer: attention_dropout = 1.5 is not a probability",
        ),
        (
            lambda: attention(dropout_rate=-0.1),
            ShapeContractError,
            "MultiHeadAttention: dropout_rate = -0.1 is not a probability",
        ),
        (
            lambda: layer("16", 32),
            ShapeContractError,
            "linear(parallel='column'): in_features = '16' is not a positive integer "
            "or a tuple of them. Pass the global size, or one size for each dimension",
        ),
        (lambda: layer(16, ()), ShapeContractError, "out_features = () is not a pos"),
        (
            lambda: attention(0, 16),
            ShapeContractError,
            "MultiHeadAttention: num_heads = 0 is not a positive integer. Pass the glo",
        ),
        (lambda: attention(4, 16, 0), ShapeContractError, "qkv_features = 0 is not a"),
        (
            lambda: attention(num_kv_heads=0),
            ShapeContractError,
            "MultiHeadAttention: num_kv_heads = 0 is not a positive integer.",
        ),
        (
            lambda: attention(rotary_base=0),
            ShapeContractError,
            "MultiHeadAttention: rotary_base = 0 is not a positive number. Pass one, f",
        ),
        (
            lambda: attention(rotary_base=True),
            ShapeContractError,
            "rotary_base = True is not a positive number",
        ),
        (
            lambda: transformer(epsilon=True),
            ShapeContractError,
            "epsilon = True is not a number of at least 0",
        ),
        (
            lambda: attention(attention_fn="cudnn"),
            UnknownNameError,
            "attention: attention_fn = 'cudnn' is not a hashable function. Pass "
            "a function, for example functools.partial(jax.nn.dot_product_attention, ",
        ),
        (
            lambda: transformer(18, 32, 4),
            ShapeContractError,
            "TransformerLayer: hidden_size = 18 is not a multiple of "
            "num_attention_heads = 4. Use hidden_size = 20, or pass kv_channels, the ",
        ),
        (
            lambda: transformer(16, 32, 0),
            ShapeContractError,
            "TransformerLayer: num_attention_heads = 0 is not a positive integer.",
        ),
        (lambda: transformer(kv_channels=0), ShapeContractError, "kv_channels = 0 is"),
        (
            lambda: transformer(num_gqa_groups=0),
            ShapeContractError,
            "TransformerLayer: num_gqa_groups = 0 is not a positive integer.",
        ),
        (
            lambda: transformer(16, 32, 4, num_gqa_groups=3),
            ShapeContractError,
            "TransformerLayer: num_attention_heads = 4 is not a multiple of "
            "num_gqa_groups = 3.",
        ),
        (
            lambda: LayerNormMLP(16, None, rngs=nnx.Rngs(0)),
            ShapeContractError,
            "LayerNormMLP: ffn_hidden_size = None is not a positive integer.",
        ),
        (
            lambda: LayerNormLinear(16, 32, epsilon="a", rngs=nnx.Rngs(0)),
            ShapeContractError,
            "LayerNormLinear: epsilon = 'a' is not a number of at least 0 and less ",
        ),
        (
            lambda: layer(sequence_parallel="no"),
            UnknownNameError,
            "linear(parallel='column'): sequence_parallel = 'no' is not a bool. Pass",
        ),
        (
            lambda: layer(method="ring_exchang"),
            UnknownNameError,
            "method = 'ring_exchang' is not a method. Did you mean 'ring_exchange'?",
        ),
        (
            lambda: layer(kernel_metadata={"out_sharding": ("tp", None)}),
            ShapeContractError,
            "the kernel is sharded P('tp', None), along its in dimension, but 'column' "
            "needs its out dimension over 'tp'. Shard it P(None, 'tp'), or use 'row'.",
        ),
    ],
)
def test_invalid_layers_are_rejected(make, error, text):
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("x", "residual", "text"),
    [
        (None, None, "linear(parallel='row'): x is of type NoneType, but the op takes"),
        (np.ones((8, 16)), 1.0, "linear(parallel='row'): residual is of type float, "),
    ],
)
def test_other_values_than_arrays_are_rejected(x, residual, text):
    with jax.set_mesh(mesh_of(2, 4)):
        model = layer(parallel="row")
        with pytest.raises(ShapeContractError, match=re.escape(text)):
            model(x, residual=residual)


@pytest.mark.parametrize("name", ["mask", "positions"])
def test_a_mask_and_positions_are_arrays(name):
    model = attention(rotary_base=10.0)
    with (
        jax.set_mesh(mesh_of(2, 4)),
        pytest.raises(ShapeContractError, match=f"attention: {name} is of type list, "),
    ):
        model(jnp.ones((2, 8, 16)), **{name: [[1] * 8] * 8})


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: LayerNormLinear(16, 32, rngs=nnx.Rngs(0)), "LayerNormLinear"),
        (lambda: LayerNormMLP(16, 32, rngs=nnx.Rngs(0)), "LayerNormMLP"),
        (transformer, "TransformerLayer"),
    ],
)
def test_inputs_of_a_norm_are_an_array(make, op):
    text = f"{op}: inputs is of type NoneType, but the op takes an array. Pass one."
    with pytest.raises(ShapeContractError, match=text):
        make()(None)


@pytest.mark.parametrize(
    ("options", "shape", "text"),
    [
        (
            {},
            (2, 6, 16),
            "x (2, 6, 16) has 6 tokens (axis -2), which do not divide into 4 ranks. "
            "Pad to 8 tokens, or use sequence_parallel=False.",
        ),
        (
            {"data_axes": ("dp",)},
            (3, 8, 16),
            "x (3, 8, 16) has a leading axis of 3, which does not divide into the 2 "
            "ranks of data_axes = ('dp',). Pass other data_axes, or data_axes=().",
        ),
        (
            {"data_axes": ("dpp",)},
            (2, 8, 16),
            "data_axes has 'dpp', which is not an axis of the mesh {'dp': 2, 'tp': 4}. "
            "Did you mean 'dp'?",
        ),
        ({"data_axes": "dpp"}, (2, 8, 16), "data_axes has 'dpp', which is not"),
    ],
)
def test_indivisible_activations_are_rejected(options, shape, text):
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(ValueError, match=re.escape(text)):
        layer(**options)(jnp.ones(shape))


@pytest.mark.parametrize(
    ("make", "shape", "text"),
    [
        (
            lambda: layer((8, 4), 16, parallel="row"),
            (2, 8, 4, 8),
            "linear(parallel='row'): x (2, 8, 4, 8) has features [4, 8], but the "
            "kernel (8, 4, 16) takes [8, 4], in global sizes. Pass x [..., tokens, 8, "
            "4], or make the layer for [4, 8].",
        ),
        (lambda: layer((8, 4), 16, parallel="row"), (4,), "x (4,) has features [4], "),
        # The shape of one rank's shard, or of another layer's.
        (
            lambda: layer(8, 16, parallel="row"),
            (2, 8, 16),
            "x (2, 8, 16) has features [16], but the kernel (8, 16) takes [8]",
        ),
        (
            lambda: MultiHeadAttention(4, 32, rngs=nnx.Rngs(0)),
            (2, 8, 16),
            "linear(parallel='column') (ub_name 'qkv'): x (2, 8, 16) has features "
            "[16], but the kernel (32, 4, 8) takes [32], in global sizes.",
        ),
    ],
)
def test_features_that_differ_from_the_kernel_s_are_rejected(make, shape, text):
    with (
        jax.set_mesh(mesh_of(2, 4)),
        pytest.raises(ShapeContractError, match=re.escape(text)),
    ):
        make()(jnp.ones(shape))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 8, 2, 8), r"x \(2, 8, 2, 8\) has features \[2, 8\].*in one rank's sizes"),
        ((2, 8, 8, 4), "The activations are not sharded along their features"),
    ],
)
def test_features_that_differ_from_the_ranks_shard_are_rejected(shape, text):
    graph, state = nnx.split(layer((8, 4), 16, parallel="row"))
    with pytest.raises(ShapeContractError, match=text):
        jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=mesh_of(1, 2),
            in_specs=(nnx.get_partition_spec(state), P()),
            out_specs=P(None, "tp"),
        )(state, jnp.ones(shape))


@pytest.mark.parametrize(
    ("outs", "parallel", "shape", "text"),
    [
        (16, "row", (16,), "residual has shape (16,), but the result has (2, 8, 16)"),
        (
            (4, 4),
            "column",
            (4,),
            "residual has shape (4,), but the result ends in (4, 4). Pass a residual "
            "of the result's shape.",
        ),
    ],
)
def test_a_residual_of_another_shape_is_rejected(outs, parallel, shape, text):
    with (
        jax.set_mesh(mesh_of(1, 4)),
        pytest.raises(ShapeContractError, match=re.escape(text)),
    ):
        layer(16, outs, parallel=parallel)(
            jnp.ones((2, 8, 16)), residual=jnp.ones(shape)
        )


def test_a_call_without_a_mesh_lists_the_ways_to_pass_one():
    text = (
        "linear(parallel='column'): no mesh is known here: mesh= is not given, "
        "jax.set_mesh has set none (`with mesh:` does not), and the kernel is not "
        "sharded over one. Call the layer under jax.set_mesh(mesh), pass mesh=, or "
        "call it inside jax.shard_map over 'tp'."
    )
    with pytest.raises(ShapeContractError, match=re.escape(text)):
        layer()(jnp.ones((8, 16)))


def test_a_kernel_sharded_along_the_wrong_dimension_is_rejected():
    with jax.set_mesh(mesh_of(1, 2, "explicit")):
        model = layer()
        model.kernel.set_value(jax.sharding.reshard(model.kernel[...], jax.P("tp")))
        with pytest.raises(ShapeContractError, match="along its in dimension"):
            nnx.jit(lambda model, x: model(x))(model, jnp.ones((8, 16)))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("parallel", [None, "column", "row"])
def test_a_bias_of_another_shape_is_named_in_the_error(parallel, sequence_parallel):
    options = {"parallel": parallel, "sequence_parallel": sequence_parallel}
    with jax.set_mesh(mesh_of(2, 4)):
        module = layer(16, 32, **options)
        module.bias = nnx.Param(jnp.zeros(16))
        with pytest.raises(ShapeContractError, match=r": bias has shape \(\d+,\)"):
            module(jnp.ones((2, 8, 16)))
