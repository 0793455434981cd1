import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax_models import mesh_of
from jax.sharding import PartitionSpec as P
from operands import assert_equal

from jax_ub.errors import ShapeContractError, UnknownNameError, UnsupportedOverlapError
from jax_ub.flax import linen

X = (4, 8, 16)
NORM = "normalization = 'RMSNrm' is not known. Did you mean 'RMSNorm'?"
REFUSED = {
    "row": (
        linen.LayerNormLinear(32, parallel="rs"),
        UnsupportedOverlapError,
        'LayerNormLinear: parallel = "row" shards the features, but a norm needs all '
        'features of a token. Use parallel="column", or a separate norm before',
    ),
    "norm": (
        linen.LayerNormLinear(32, normalization="RMSNrm"),
        UnknownNameError,
        f"LayerNormLinear: {NORM}",
    ),
    "norm of a layer": (
        linen.TransformerLayer(16, 32, 4, normalization="RMSNrm"),
        UnknownNameError,
        f"TransformerLayer: {NORM}",
    ),
    "activation": (
        linen.LayerNormMLP(16, 32, activation="swigul"),
        UnknownNameError,
        "LayerNormMLP: activation = 'swigul' is not known. Did you mean 'swiglu'?",
    ),
    "groups": (
        linen.MultiHeadAttention(4, num_kv_heads=3),
        ShapeContractError,
        "MultiHeadAttention: num_heads = 4 is not a multiple of num_kv_heads = 3.",
    ),
    "features of heads": (
        linen.MultiHeadAttention(4, 18),
        ShapeContractError,
        "qkv_features = 18 is not a multiple of num_heads = 4. Use qkv_features = 20.",
    ),
    "odd heads": (
        linen.TransformerLayer(16, 32, 4, kv_channels=3, rotary_base=10.0),
        ShapeContractError,
        "rotary embeddings rotate pairs of features. Use qkv_features = 16.",
    ),
    "heads of ranks": (
        linen.MultiHeadAttention(4, num_kv_heads=1),
        ShapeContractError,
        "num_kv_heads = 1 does not divide into the 2 ranks of mesh axis 'tp', which "
        "have whole heads. Use 2",
    ),
    "features": (
        linen.LayerNormMLP(32, 32),
        ShapeContractError,
        "LayerNormMLP: inputs have shape (4, 8, 16), but the norm has 32 features.",
    ),
    "axes": (
        linen.Linear(4, axis=(0, 2)),
        UnsupportedOverlapError,
        "linear(parallel=None): axis = (0, 2) for inputs of 3 dimensions, but only the "
        "last dimensions can be contracted. Use axis = (-2, -1) after jnp.moveaxis.",
    ),
    "features of a layer": (
        linen.TransformerLayer(18, 32, 4),
        ShapeContractError,
        "TransformerLayer: hidden_size = 18 is not a multiple of num_attention_heads = "
        "4. Use hidden_size = 20, or pass kv_channels, the number of features of a ",
    ),
    "no heads": (
        linen.MultiHeadAttention(0),
        ShapeContractError,
        "MultiHeadAttention: num_heads = 0 is not a positive integer.",
    ),
    "function": (
        linen.MultiHeadAttention(4, attention_fn="cudnn"),
        UnknownNameError,
        "attention: attention_fn = 'cudnn' is not a hashable function. Pass ",
    ),
    "no groups": (
        linen.MultiHeadAttention(4, num_kv_heads=0),
        ShapeContractError,
        "MultiHeadAttention: num_kv_heads = 0 is not a positive integer.",
    ),
    "channels": (
        linen.TransformerLayer(16, 32, 4, kv_channels=0),
        ShapeContractError,
        "TransformerLayer: kv_channels = 0 is not a positive integer.",
    ),
    "size": (
        linen.LayerNormMLP(16, None),
        ShapeContractError,
        "LayerNormMLP: ffn_hidden_size = None is not a positive integer.",
    ),
    "out features": (
        linen.Linear("16"),
        ShapeContractError,
        "linear(parallel=None): features = '16' is not a positive integer or",
    ),
    "epsilon": (
        linen.LayerNormLinear(32, epsilon="a"),
        ShapeContractError,
        "LayerNormLinear: epsilon = 'a' is not a number of at least 0 and less",
    ),
    "hidden dropout": (
        linen.TransformerLayer(16, 32, 4, hidden_dropout="0.1"),
        ShapeContractError,
        "TransformerLayer: hidden_dropout = '0.1' is not a probability. Pass a number",
    ),
    "attention dropout": (
        linen.TransformerLayer(16, 32, 4, attention_dropout=1.5, deterministic=True),
        ShapeContractError,
        "TransformerLayer: attention_dropout = 1.5 is not a probability. Pass",
    ),
    "dropout": (
        linen.MultiHeadAttention(4, dropout_rate=-0.1),
        ShapeContractError,
        "MultiHeadAttention: dropout_rate = -0.1 is not a probability. "
        "Pass a number of at least 0 and less than 1.",
    ),
    "method": (
        linen.TransformerLayer(16, 32, 4, method="dircet"),
        UnknownNameError,
        "method = 'dircet' is not a method. Did you mean 'direct'?",
    ),
}


@pytest.mark.parametrize(("module", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_modules_are_rejected(module, error, text):
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(error, match=re.escape(text)),
    ):
        module.init(jax.random.key(0), jnp.ones(X))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (linen.Linear(32, parallel="column"), "linear(parallel='column'): x"),
        (linen.LayerNormLinear(32), "LayerNormLinear: inputs"),
        (linen.LayerNormMLP(16, 32), "LayerNormMLP: inputs"),
        (linen.MultiHeadAttention(4), "MultiHeadAttention: inputs_q"),
        (linen.TransformerLayer(16, 32, 4), "TransformerLayer: inputs"),
    ],
)
def test_other_values_than_arrays_are_rejected(module, name):
    text = f"{name} is of type NoneType, but the op takes an array. Pass one."
    with pytest.raises(ShapeContractError, match=re.escape(text)):
        module.init(jax.random.key(0), None)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [("column", "18 in"), ("row", "10 out"), (None, "18 in")],
)
def test_inside_shard_map_fsdp_axes_must_divide_the_features(parallel, text):
    layer = linen.Linear(10, parallel=parallel, fsdp_axes="dp", use_bias=False)
    init = jax.shard_map(
        lambda x: layer.init(jax.random.key(0), x),
        mesh=mesh_of(4, 1),
        in_specs=P("dp"),
        out_specs=P(),
    )
    text = f"the kernel has {text} features, which do not divide into the 4 ranks of "
    with pytest.raises(ShapeContractError, match=re.escape(text + "fsdp_axes")):
        jax.eval_shape(init, jnp.ones((4, 8, 18)))


def test_inputs_without_features_are_rejected():
    with pytest.raises(ShapeContractError, match=r"x has shape \(\), but the op takes"):
        linen.Linear(32).init(jax.random.key(0), jnp.float32(1))


def test_rotary_embeddings_of_other_inputs_are_rejected():
    layer = linen.MultiHeadAttention(4, rotary_base=10.0)
    with pytest.raises(
        UnsupportedOverlapError, match="rotary_base is given, but inputs_k differ"
    ):
        layer.init(jax.random.key(0), jnp.ones(X), jnp.ones((4, 3, 16)))


def test_an_indivisible_first_dimension_is_rejected_even_if_the_product_divides():
    layer = linen.Linear((6, 8), parallel="column")
    variables = layer.init(jax.random.key(0), jnp.ones(X))
    expected = nn.DenseGeneral((6, 8)).init(jax.random.key(0), jnp.ones(X))
    assert_equal(variables, expected)
    with (
        jax.set_mesh(mesh_of(1, 4)),
        pytest.raises(ShapeContractError, match=r"6 out features.*4 ranks.*Use 8"),
    ):
        layer.apply(variables, jnp.ones(X))
