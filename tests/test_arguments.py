"""The texts of errors about options. `test_fuzz.py` checks all arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jax_ub as ub
from jax_ub import ops
from jax_ub._src import arguments
from jax_ub._src import checks as shapes
from jax_ub.errors import (
    ConfigurationError,
    ShapeContractError,
    UnknownArgumentError,
    UnknownNameError,
)
from jax_ub.flax import (
    LayerNormMLP,
    Linear,
    MultiHeadAttention,
    TransformerLayer,
    linen,
)

X = np.zeros((2, 4, 8), np.float32)


def linear(**options):
    return Linear(8, 8, **{"rngs": nnx.Rngs(0), **options})


def called(**options):
    return linear(**options)(X)


def attention(x, **options):
    with jax.set_mesh(jax.make_mesh((1,), ("tp",))):
        return MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **options)(x)


def mlp(x, **options):
    with jax.set_mesh(jax.make_mesh((1,), ("tp",))):
        return LayerNormMLP(8, 16, rngs=nnx.Rngs(0), **options)(x)


WRONG = {
    "Linear: kernel_init = 'zeros' is not a function. Pass one.": lambda: linear(
        kernel_init="zeros"
    ),
    "kernel_init returned None for shape (8, 8). Pass a function of (key,": lambda: (
        linear(kernel_init=lambda *args: None)
    ),
    "Linear: dtype = 'f5' is not a floating-point dtype. Pass one, for": lambda: linear(
        dtype="f5"
    ),
    "Linear: param_dtype = <class 'jax.numpy.int32'> is not a floating": lambda: linear(
        param_dtype=jnp.int32
    ),
    "Linear: precision = {} is not a precision. Pass a jax.lax.Precision": lambda: (
        linear(precision={})
    ),
    "Linear: precision = 'hgh' is not a precision. Pass a jax.lax.Precision": lambda: (
        linear(precision="hgh")
    ),
    "Linear: kernel_metadata = 1 is not a dictionary of names and values.": lambda: (
        linear(kernel_metadata=1)
    ),
    "Linear: rngs = 0 is not an object with keys for parameters. Pass, for": lambda: (
        linear(rngs=0)
    ),
    "promote_dtype returned None, not an array for each of the 3 that": lambda: called(
        promote_dtype=lambda arrays, dtype: None
    ),
    "promote_dtype failed for inputs, kernel and bias of ['int4',": lambda: linear()(
        jnp.zeros((4, 8), jnp.int4)
    ),
    "out_sharding = 'tp' is of type str. Pass a jax.sharding.Sharding or": lambda: (
        linear()(X, "tp")
    ),
    "attention: attention_fn returned None for queries of shape (2, 4, 2,": lambda: (
        attention(X, attention_fn=lambda *args, **options: None)
    ),
    "LayerNormMLP: activation returned None for an array of shape (2, 4, ": lambda: mlp(
        X, activation=lambda x: None
    ),
    " is of type Mesh. Pass a jax.sharding.Mesh with axes, or None to": lambda: linear(
        mesh=Mesh(np.empty((), object), ())
    ),
    "linear(parallel=None): axis = 'x' is not an integer or a tuple of them.": lambda: (
        linen.Linear(8, axis="x").init(jax.random.key(0), X)
    ),
    "Bias: size = 10000000000000000 is not a positive integer. Pass the": lambda: (
        ops.Bias(10**16)
    ),
    "init: key = 0 is not one key of jax.random. Pass, for example, jax": lambda: (
        ops.Sequential(ops.Bias(8)).init(0)
    ),
    "Bias: bias_init returned 'no' for shape (8,). Pass a function of": lambda: (
        ops.Bias(8, bias_init=lambda *args: "no").init(jax.random.key(0))
    ),
    "AddExtraInput: extra_input_channels = 'ab' is not a tuple of 1 entri": lambda: (
        ops.AddExtraInput(extra_input_channels="ab")
    ),
    "MakeExtraOutput: extra_output_channels = ('a',) is not a tuple of 1 ": lambda: (
        ops.MakeExtraOutput(extra_output_channels=("a",))
    ),
    "AddExtraInput: it has no extra input '0', but 1 of them": lambda: (
        ops.AddExtraInput().with_extra_input_channel("0", "x")
    ),
    "AddExtraInput: 'a b' is not the name of a channel. Pass a string": lambda: (
        ops.AddExtraInput(extra_input_channels=("a b",))
    ),
    "BackwardLinearAdd: linear = 1 is a int, not an ops.BasicLinear. Pass": lambda: (
        ops.fused.BackwardLinearAdd(backward_add=ops.MakeExtraOutput(), linear=1)
    ),
    "dgrad_add: residual has dtype key<fry>, but the op takes a numeric": lambda: (
        ub.dgrad_add(X[0], jnp.zeros((8, 8)), jax.random.key(0))
    ),
    "dgrad_add: dy is of type ShapeDtypeStruct, but the op takes an": lambda: (
        ub.dgrad_add(
            jax.ShapeDtypeStruct((4, 8), "float32"),
            jnp.zeros((8, 8)),
            jnp.zeros((4, 8)),
        )
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_an_option_of_another_type_is_rejected(text):
    with pytest.raises(ShapeContractError) as caught:
        WRONG[text]()
    assert text in str(caught.value)


PRECISIONS = [
    *("highest", "tensorfloat32", "BF16_BF16_F32", "hgh", "HIGHEST", "", 3, ()),
    *(jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.F32_F32_F32),
    jax.lax.DotAlgorithm(np.float32, np.float32, np.float32, 1, 1, 1, False),
    *(("highest", "default"), ["high", "high"], ("highest", "hgh"), ("highest",)),
    *((jax.lax.Precision.HIGH,) * 2, ("high", jax.lax.Precision.HIGH)),
    ("highest", "BF16_BF16_F32"),
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=repr)
def test_a_precision_is_accepted_if_jax_accepts_it(precision):
    x, dims = jnp.ones((2, 2)), (((1,), (0,)), ((), ()))

    def is_accepted(function):
        try:
            with jax.set_mesh(jax.make_mesh((1,), ("tp",))):
                jax.eval_shape(function)
        except (TypeError, ValueError):
            return False
        return True

    wanted = is_accepted(lambda: jax.lax.dot_general(x, x, dims, precision))
    dot = ub.dot_general("column")
    assert is_accepted(lambda: dot(x, x, dims, precision)) == wanted
    assert is_accepted(lambda: linear(precision=precision)) == wanted


class Unhashable:
    __hash__ = None

    def __call__(self, key, shape, dtype):
        return jnp.zeros(shape, dtype)


def test_a_field_that_does_not_hash_is_rejected():
    with pytest.raises(ShapeContractError, match="bias_init = .* is not hashable"):
        ops.Bias(8, bias_init=Unhashable())


def test_a_name_that_is_no_string_is_rejected():
    text = r"linear: ub_name = 1 is not the name of a layer"
    with pytest.raises(UnknownNameError, match=text):
        linear(ub_name=1)


MISSPELT = {
    "Linear: it has no argument 'paralel'. Did you mean 'parallel'? Known: 'in_": (
        lambda: linear(paralel="row")
    ),
    "TransformerLayer: it has no argument 'acivation'. Did you mean 'activation'? "
    "Known: 'hidden_size', ": lambda: TransformerLayer(
        8, 16, 2, rngs=nnx.Rngs(0), acivation="gelu"
    ),
    "Linear: it has no argument 'paralel'. Did you mean 'parallel'? Known: 'feature": (
        lambda: linen.Linear(8, paralel="row")
    ),
    "MultiHeadAttention: it has no argument 'dropout'. Did you mean 'dropout_rate'?": (
        lambda: linen.MultiHeadAttention(2, dropout=0.1)
    ),
    "ops.Linear: it has no argument 'axisname'. Did you mean 'axis_name'? Known: 'in": (
        lambda: ops.Linear(8, 8, axisname="tp")
    ),
    "ops.AllGather: it has no argument 'axis'. Did you mean 'axis_name'? Known: 'ax": (
        lambda: ops.AllGather(axis="tp")
    ),
    "ops.Sequential: it has no argument 'method'. Known: none.": (
        lambda: ops.Sequential(ops.GELU(), method="xla")
    ),
    "ops.OperationFuser: it has no argument 'method'. Known: 'ops'.": (
        lambda: ops.OperationFuser([ops.GELU()], method="xla")
    ),
    "Overlap: it has no argument 'axis'. Did you mean 'axis_name'?": (
        lambda: linen.Overlap({"": "row"}, axis="tp")
    ),
    "overlap: it has no argument 'axis'. Did you mean 'axis_name'?": (
        lambda: ub.overlap(None, axis="tp")
    ),
    "dot_general: it has no argument 'paralel'. Known: 'kind'": (
        lambda: ub.dot_general(paralel="row")
    ),
    "DelayedScaling: it has no argument 'amax_history'. Did you mean 'amax_history_": (
        lambda: ub.fp8.DelayedScaling(amax_history=16)
    ),
    "LayerNormMLP: it has no argument 'fuse_wgrad_accumulation', which is Transformer "
    "Engine's. Did you mean 'main_grad'?": (
        lambda: LayerNormMLP(8, 8, rngs=nnx.Rngs(0), fuse_wgrad_accumulation=True)
    ),
    "MultiHeadAttention: it has no argument 'num_gqa_groups', which is Transformer "
    "Engine's. Did you mean 'num_kv_heads'?": (
        lambda: MultiHeadAttention(4, 8, rngs=nnx.Rngs(0), num_gqa_groups=2)
    ),
    "MultiHeadAttention: it has no argument 'num_attention_heads', which is "
    "Transformer Engine's. Did you mean 'num_heads'?": (
        lambda: linen.MultiHeadAttention(num_attention_heads=2)
    ),
    "LayerNormMLP: it has no argument 'set_parallel_mode', which is Transformer "
    "Engine's. Leave it out: ": (
        lambda: LayerNormMLP(8, 8, rngs=nnx.Rngs(0), set_parallel_mode=True)
    ),
    "LayerNormMLP: it has no argument 'ub_tp_comm_overlap', which is Transformer "
    "Engine's. Leave it out: sequence-parallel layers overlap by default.": (
        lambda: LayerNormMLP(8, 8, rngs=nnx.Rngs(0), ub_tp_comm_overlap=True)
    ),
    "TransformerLayer: it has no argument 'seq_length', which is Transformer Engine's. "
    "Leave it out: the layer takes these sizes from x.": (
        lambda: TransformerLayer(8, 16, 2, rngs=nnx.Rngs(0), seq_length=128)
    ),
    "TransformerLayer: it has no argument 'window_size', which is Transformer "
    "Engine's. Did you mean 'attention_fn'?": (
        lambda: TransformerLayer(8, 16, 2, rngs=nnx.Rngs(0), window_size=(128, 0))
    ),
    "Linear: it has no argument 'gather_output', which is Megatron-LM's. Leave it "
    "out: jax.reshard gathers the result.": (
        lambda: Linear(8, 8, rngs=nnx.Rngs(0), gather_output=False)
    ),
    "Linear: it has no argument 'tp_comm_buffer_name', which is Megatron-LM's. Did "
    "you mean 'ub_name'?": (
        lambda: Linear(8, 8, rngs=nnx.Rngs(0), tp_comm_buffer_name="qkv")
    ),
    "ops.BasicLinear: it has no argument 'tensor_parallel_group', which is "
    "Transformer Engine's. Did you mean 'axis_name'?": (
        lambda: ops.BasicLinear(8, 8, tensor_parallel_group=None)
    ),
    "ops.BasicLinear: it has no argument 'tp_group', which is Transformer Engine's. "
    "Did you mean 'axis_name'?": lambda: ops.BasicLinear(8, 8, tp_group=None),
    "TransformerLayer: it has no argument 'num_kv_heads'. Did you mean 'num_gqa_": (
        lambda: TransformerLayer(8, 16, 2, rngs=nnx.Rngs(0), num_kv_heads=1)
    ),
    "ops.BackwardLinearAdd: it has no argument 'lin'. Did you mean 'linear'?": (
        lambda: ops.fused.BackwardLinearAdd(lin=None)
    ),
}


@pytest.mark.parametrize("text", MISSPELT)
def test_a_keyword_that_a_layer_does_not_have_is_rejected(text):
    with pytest.raises(UnknownArgumentError) as caught:
        MISSPELT[text]()
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("layer", [ops.Bias, Linear, linen.Linear])
def test_the_signature_of_a_layer_has_the_arguments_of_its_constructor(layer):
    named = list(inspect.signature(layer).parameters)
    assert named == list(inspect.signature(layer.__init__).parameters)[1:]


def test_an_operation_that_is_called_has_the_signature_of_the_call():
    found = inspect.signature(ops.Sequential(ops.GELU()))
    assert list(found.parameters)[:2] == ["params", "x"]


def test_a_list_of_known_arguments_has_no_other_names():
    with pytest.raises(UnknownArgumentError) as caught:
        TransformerLayer(8, 16, 2, rngs=nnx.Rngs(0), num_heads=2)
    known = str(caught.value).partition("Known: ")[2]
    assert "'activation'" in known and "'args'" not in known and "'self'" not in known


@pytest.mark.parametrize("value", [True, False, 0, 1, np.bool_(True)])
def test_a_flag_is_a_bool_or_0_or_1(value):
    shapes.check_flag("op", "flag", value)


@pytest.mark.parametrize("value", [None, "yes", 2, 1.0, np.zeros(2), {}])
def test_other_flags_are_rejected(value):
    with pytest.raises(UnknownNameError, match="op: flag = .* Pass True or False"):
        shapes.check_flag("op", "flag", value)


def test_an_array_of_keys_is_not_one_key():
    shapes.check_key("op", "key", jax.random.key(0))
    shapes.check_key("op", "key", jax.random.PRNGKey(0))
    with pytest.raises(ShapeContractError, match="is not one key of jax.random"):
        shapes.check_key("op", "key", jax.random.split(jax.random.key(0)))


def test_options_without_a_known_name_are_not_checked():
    arguments.check("op", another=object(), spec=PartitionSpec())


@pytest.mark.parametrize(
    ("op", "make"),
    {
        "Linear": lambda: linear(fp8="delayed"),
        "TransformerLayer": lambda: TransformerLayer(
            8, 16, 2, rngs=nnx.Rngs(0), fp8="delayed"
        ),
        "LayerNormMLP": lambda: linen.LayerNormMLP(8, 8, fp8="delayed"),
        "BasicLinear": lambda: ops.BasicLinear(8, 8, fp8="delayed"),
        "dot_general": lambda: ub.dot_general("row", fp8="delayed"),
        "overlap": lambda: linen.Overlap({"up": "row"}, fp8={"up": "delayed"}),
        "linear": lambda: ub.linear(X, X[0].T, fp8="delayed"),
    }.items(),
)
def test_a_wrong_recipe_is_called_by_the_name_of_its_argument(op, make):
    with pytest.raises(ConfigurationError, match=f"^{op}: fp8 = 'delayed' is not a"):
        make()
