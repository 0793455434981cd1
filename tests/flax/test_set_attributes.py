"""Attributes that are set after a layer was created: they apply, or raise an error."""

import copy
import pickle

import jax
import pytest
from flax import nnx
from flax_models import assert_trees_close, mesh_of, random_layer, random_variables
from operands import assert_equal, normal

import jax_ub as ub
from jax_ub.errors import ConfigurationError, ShapeContractError, UnknownNameError
from jax_ub.flax import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MainGrad,
    MultiHeadAttention,
    TransformerLayer,
    linen,
)

X = (2, 4, 16)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(mesh_of(1, 2)):
        yield


def attention(**options):
    return random_layer(MultiHeadAttention, 4, 16, **options)


def transformer(**options):
    return random_layer(TransformerLayer, 16, 32, 4, **options)


def ones_like_queries(q, k, v, **options):
    return q * 0 + 1


LAYERS = {
    "Linear": lambda: random_layer(Linear, 16, 32),
    "LayerNormLinear": lambda: random_layer(LayerNormLinear, 16, 32),
    "LayerNormMLP": lambda: random_layer(LayerNormMLP, 16, 32),
    "MultiHeadAttention": attention,
    "TransformerLayer": transformer,
}


@pytest.mark.parametrize(
    ("start", "changed"),
    [
        ({}, {"is_causal": True}),
        ({}, {"rotary_base": 100.0}),
        ({"rotary_base": 100.0}, {"rotary_base": None}),
        ({}, {"attention_fn": ones_like_queries}),
        pytest.param(
            *({"dropout_rate": 0.5}, {"dropout_rate": 0.25}), marks=pytest.mark.matrix
        ),
        ({"dropout_rate": 0.5}, {"broadcast_dropout": False}),
        ({"dropout_rate": 0.5}, {"deterministic": True}),
        ({"dropout_rate": 0.5}, {"dropout_rate": 0.0}),
    ],
)
def test_a_set_attribute_of_attention_acts_as_its_argument(start, changed):
    x = normal(0, X)
    set_later, made, unchanged = (
        attention(**start),
        attention(**{**start, **changed}),
        attention(**start),
    )
    for name, value in changed.items():
        setattr(set_later, name, value)
        assert getattr(set_later, name) == value
    call = nnx.jit(lambda model, x: model(x))
    expected = call(made, x)
    assert_equal(call(set_later, x), expected)
    assert abs(call(unchanged, x) - expected).max() > 1e-3
    merged = nnx.merge(*nnx.split(set_later))
    assert all(getattr(merged, name) == value for name, value in changed.items())


def test_set_attributes_of_flax_changes_attention():
    model, x = transformer(attention_dropout=0.5), normal(0, X)
    model.set_attributes(dropout_rate=0.0, is_causal=False)
    run = nnx.jit(lambda model, x: model(x))
    assert_equal(run(model, x), run(transformer(is_causal=False), x))


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("is_causal", "no", UnknownNameError, "attention: is_causal = 'no' is not a"),
        ("broadcast_dropout", 2, UnknownNameError, "broadcast_dropout = 2 is not a"),
        ("rotary_base", -1, ShapeContractError, "rotary_base = -1 is not a positive"),
        ("rotary_base", True, ShapeContractError, "rotary_base = True is not a pos"),
        ("dropout_rate", 1, ShapeContractError, "dropout_rate = 1 is not a prob"),
        ("attention_fn", 3, UnknownNameError, "attention_fn = 3 is not a hashable"),
    ],
)
def test_a_wrong_attribute_of_attention_is_rejected_when_it_is_set(
    name, value, error, text
):
    model = attention()
    with pytest.raises(error, match=text):
        setattr(model, name, value)


def test_rotary_embeddings_need_pairs_of_features():
    model = attention(qkv_features=12)
    model.rotary_base = 10.0
    with pytest.raises(ShapeContractError, match=r"rotary_base = 10.0, .* 3 features"):
        model(normal(0, X))


def test_a_dropout_rate_that_is_set_later_needs_a_stream():
    model, x = attention(), normal(0, X)
    model.dropout_rate = 0.5
    with pytest.raises(ConfigurationError, match=r"dropout_rate = 0.5 was set on a"):
        model(x)
    plain = model(x, deterministic=True)
    model.rngs = nnx.Rngs(dropout=0).dropout.fork()
    assert abs(model(x) - plain).max() > 1e-3


def test_the_rate_of_the_dropout_of_a_transformer_layer_may_be_set():
    model, x = transformer(hidden_dropout=0.5), normal(0, X)
    model.dropout.rate = 0.0
    assert_equal(model(x), transformer()(x))
    model.dropout.rate = 1.0  # would make gradients NaN
    with pytest.raises(ShapeContractError, match=r"dropout\.rate = 1\.0 is not a prob"):
        model(x)


@pytest.mark.parametrize("kind", LAYERS)
def test_arguments_that_only_the_constructor_reads_cannot_be_set(kind):
    model = LAYERS[kind]()
    assert {"mesh", "method", "sequence_parallel", "fp8"} <= type(model)._fixed
    for name in type(model)._fixed:
        before = getattr(model, name, None)
        text = rf"{kind}: {name} = True is set after the constructor"
        with pytest.raises(ConfigurationError, match=text):
            setattr(model, name, True)
        if hasattr(model, name):
            with pytest.raises(ConfigurationError, match=text):
                model.set_attributes(**{name: True})
        assert getattr(model, name, None) is before


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (LAYERS["Linear"], ["in_features", "out_features", "param_dtype", "use_bias"]),
        (attention, ["num_heads", "num_kv_heads", "head_dim"]),
    ],
)
def test_stored_arguments_that_no_call_reads_cannot_be_set(make, names):
    model, x = make(), normal(0, X)
    assert set(names) <= type(model)._fixed
    assert [getattr(model, name) for name in names] in (
        [16, 32, jax.numpy.float32, True],
        [4, 4, 4],
    )
    y = model(x)
    copies = nnx.merge(*nnx.split(model)), copy.deepcopy(model), nnx.clone(model)
    for each in (model, *copies, pickle.loads(pickle.dumps(model))):
        for name in names:
            with pytest.raises(ConfigurationError, match=f"{name} = 2 is set after"):
                setattr(each, name, 2)
        assert_equal(each(x), y)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("is_causal", "Set attention.is_causal."),
        ("attention_dropout", "Set attention.dropout_rate."),
        ("deterministic", r"Call train\(\) or eval\(\)."),
        ("rngs", "Set attention.rngs or dropout.rngs."),
        ("method", "Create another TransformerLayer with method=."),
    ],
)
def test_the_error_names_where_a_transformer_layer_stores_an_argument(name, fix):
    with pytest.raises(ConfigurationError, match=fix):
        setattr(transformer(), name, 0)


def test_a_subclass_with_its_own_constructor_may_use_every_name():
    class Block(TransformerLayer):
        def __init__(self, mesh, rngs):
            super().__init__(16, 32, 4, mesh=mesh, rngs=rngs)
            self.mesh = self.method = mesh

    class Biased(Linear):
        def __init__(self, use_bias, rngs):
            super().__init__(16, 32, rngs=rngs)
            self.use_bias, self.in_features = use_bias, (16,)

    class Renamed(TransformerLayer):
        pass

    assert Block(None, nnx.Rngs(0)).mesh is None
    assert Biased("yes", nnx.Rngs(0)).use_bias == "yes"
    with pytest.raises(ConfigurationError, match="Renamed: method = 'xla' is set"):
        Renamed(16, 32, 4, rngs=nnx.Rngs(0)).method = "xla"


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "text"),
    [
        ("Linear", "promote_dtype", 3, ShapeContractError, "promote_dtype = 3 is not"),
        ("LayerNormMLP", "activation", "silu", ShapeContractError, "'silu' is not a f"),
        ("LayerNormLinear", "return_layernorm_output", "no", UnknownNameError, "'no'"),
    ],
)
def test_a_wrong_attribute_is_rejected_when_the_layer_is_called(
    kind, name, value, error, text
):
    model = LAYERS[kind]()
    setattr(model, name, value)
    with pytest.raises(error, match=text):
        model(normal(0, X))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("use_bias", True, r"use_bias = True is set .* Set bias to an nnx\.Param, or"),
        ("use_bias", False, r"use_bias = False is set .* Set bias to .* or to None\."),
        ("main_grad", True, r"main_grad = True is set .* Set it to a MainGrad, or to"),
        ("main_grad", False, r"main_grad = False is set .* or to None\."),
    ],
)
def test_a_flag_that_adds_an_array_is_rejected_when_it_is_set(name, value, text):
    model = random_layer(Linear, 16, 32, use_bias=False)
    with pytest.raises(ConfigurationError, match=f"Linear: {text}"):
        setattr(model, name, value)
    with pytest.raises(ConfigurationError, match=text):
        model.set_attributes(**{name: value})
    assert not model.use_bias
    assert model.main_grad is None


def test_a_bias_may_be_added_and_removed():
    x, plain = normal(0, X), random_layer(Linear, 16, 32, use_bias=False)
    model = random_layer(Linear, 16, 32, use_bias=False)
    model.bias = nnx.Param(normal(1, (32,)))
    assert_equal(model(x), plain(x) + model.bias[...])
    model.bias = None  # as in flax.nnx.Linear
    assert_equal(nnx.merge(*nnx.split(model))(x), plain(x))


def test_a_main_grad_may_be_added_and_removed():
    x, model = normal(0, X), LAYERS["Linear"]()
    y = model(x)
    for value in (MainGrad(jax.numpy.zeros((16, 32))), None):
        model.main_grad = value
        assert_equal(model(x), y)


@pytest.mark.parametrize("as_variable", [nnx.Param, lambda array: array])
def test_parameters_may_be_set_to_variables_and_to_arrays(as_variable):
    x, w, b = normal(0, X), normal(1, (16, 32)), normal(2, (32,))
    model, flax = (
        random_layer(layer, 16, 32, **options)
        for layer, options in ((Linear, {"parallel": "column"}), (nnx.Linear, {}))
    )
    for each in (model, flax):
        each.kernel, each.bias = as_variable(w), as_variable(b)
    assert_trees_close(model(x), flax(x))
    assert_trees_close(nnx.jit(lambda model, x: model(x))(model, x), flax(x))


def test_deterministic_is_a_bool_wherever_it_is_passed():
    text, x = "deterministic = 'no' is not a bool", normal(0, X)
    model = attention(dropout_rate=0.5)
    layer = transformer(hidden_dropout=0.5)
    linen_layer = linen.TransformerLayer(16, 32, 4)
    variables = random_variables(linen_layer, x)
    calls = [
        lambda: attention(deterministic="no"),
        lambda: transformer(deterministic="no"),
        lambda: model(x, deterministic="no"),
        lambda: layer(x, deterministic="no"),
        lambda: model.set_view(deterministic="no"),
        lambda: linen.MultiHeadAttention(4, deterministic="no"),
        lambda: linen_layer.apply(variables, x, deterministic="no"),
    ]
    for call in calls:
        with pytest.raises(UnknownNameError, match=text):
            call()
    layer.dropout.deterministic = model.deterministic = "no"
    for each in (model, layer):
        with pytest.raises(UnknownNameError, match=text):
            each(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda rngs: MultiHeadAttention(4, 16, dropout_rate=0.5, rngs=rngs),
            'MultiHeadAttention: dropout_rate = 0.5 needs a PRNG stream "dropout"',
        ),
        (
            lambda rngs: TransformerLayer(16, 32, 4, attention_dropout=0.5, rngs=rngs),
            "TransformerLayer: attention_dropout = 0.5 needs",
        ),
        (
            lambda rngs: TransformerLayer(16, 32, 4, hidden_dropout=0.5, rngs=rngs),
            "TransformerLayer: hidden_dropout = 0.5 needs",
        ),
    ],
)
def test_dropout_needs_a_stream(make, text):
    with pytest.raises(ub.errors.UnknownNameError, match=text):
        make(nnx.Rngs(params=0))


def test_a_kernel_that_is_set_to_a_scaled_array_is_rejected():
    model = LAYERS["Linear"]()
    kernel = model.kernel.get_value()
    model.kernel = nnx.data(ub.quantize(kernel, ub.fp8.Float8CurrentScaling()))
    with pytest.raises(ShapeContractError, match=r"kernel is a ub\.ScaledArray, but"):
        model(normal(0, X))


@pytest.mark.parametrize(
    ("name", "value"), [("rules", {"up": "row"}), ("method", "xla"), ("mesh", None)]
)
def test_an_argument_of_an_interceptor_is_not_set_later(name, value):
    overlap = linen.Overlap({"up": "column"})
    text = rf"Overlap: {name} = .* is set after the constructor.*Create another"
    with pytest.raises(ConfigurationError, match=text):
        setattr(overlap, name, value)


def test_a_subclass_of_the_interceptor_may_use_the_names_of_arguments():
    class Named(linen.Overlap):
        def __init__(self, rules, mesh):
            super().__init__(rules, mesh=mesh)
            self.rules, self.mesh = rules, mesh

    assert Named({"up": "column"}, None).rules == {"up": "column"}
