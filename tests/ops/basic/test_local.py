"""The operations that communicate nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import nightly
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal, small_integers
from ops_on_ranks import TOKENS, value_and_gradients
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops

# XLA compiles these operations. Dtypes differ only in the rounding.
DTYPES = ["bfloat16", *nightly("float32", "float16")]
error = ub.errors.ShapeContractError


def compare(*cases, exact=False):
    """Compares operations and their gradients with functions of (params, x) in f32.

    Args:
        *cases: an operation, the function, x and, where there are, parameters.
        exact: whether they must be equal.
    """

    @jax.jit
    def run(operands):
        found = []
        for (op, plain, *_), (x, params) in zip(cases, operands, strict=True):
            seq = ops.Sequential(op)
            weights = small_integers(9, jax.eval_shape(plain, params, x).shape)
            y, ((d_params,), dx) = value_and_gradients(seq, weights)((params,), x)
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), (params, x))
            expected = value_and_gradients(plain, weights)(*wide)
            found.append(((y, (d_params, dx)), expected))
        return found

    operands = [(case[2], case[3] if len(case) > 3 else {}) for case in cases]
    for (x, _), (actual, expected) in zip(operands, run(operands), strict=True):
        assert (actual[0].dtype, actual[1][1].dtype) == (x.dtype, x.dtype)
        if exact:
            expected = jax.tree.map(lambda a, e: e.astype(a.dtype), actual, expected)
            assert_equal(actual, expected)
        else:
            jax.tree.map(functools.partial(assert_near, x.dtype), actual, expected)


def assert_near(dtype, actual, expected):
    """Asserts that arrays differ by at most a few roundings of the largest value."""
    size = max(1.0, float(np.abs(np.asarray(expected)).max()))
    atol = 4 * float(jnp.finfo(dtype).eps) * size
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    plain = lambda p, x: x + p["bias"]  # noqa: E731
    cases = []
    for size, rows in ((1, (4, 3, 8)), (7, ()), (32, (1, 3)), (32, (4, 3, 8))):
        bias = {"bias": small_integers(0, (size,))}
        x = small_integers(1, (*rows, size), dtype)
        cases.append((ops.Bias(size), plain, x, bias))
    compare(*cases, exact=True)


def test_bias_is_sharded_with_its_features():
    seq = ops.Sequential(ops.Bias(8, tensor_parallel=True))
    params, x = ({"bias": small_integers(0, (8,))},), small_integers(1, (4, 8))
    run = on_ranks(seq, tp_mesh(2), (seq.specs(), P(None, "tp")), P(None, "tp"))
    weights = small_integers(2, (4, 8))
    y, ((gradient,), dx) = value_and_gradients(run, weights)(params, x)
    assert_equal((y, dx), (x + params[0]["bias"], weights))
    assert_equal(gradient["bias"], jnp.sum(weights, 0))
    assert_equal(seq.init(jax.random.key(0))[0]["bias"], jnp.zeros(8))


def test_bias_gradient_is_summed_over_token_shards():
    seq = ops.Sequential(ops.Bias(8))
    params, x = ({"bias": small_integers(0, (8,))},), small_integers(1, (4, 8))
    weights = small_integers(2, (4, 8))
    for check_vma in (True, False):
        specs = (seq.specs(), TOKENS)
        run = on_ranks(seq, tp_mesh(2), specs, TOKENS, check_vma=check_vma)
        _, ((gradient,), _) = value_and_gradients(run, weights)(params, x)
        assert_equal(gradient["bias"], jnp.sum(weights, 0))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extra_input_is_added(dtype, in_place):
    seq = ops.Sequential(ops.AddExtraInput(in_place=in_place))
    x, extra = small_integers(0, (32, 32), dtype), small_integers(1, (32, 32), dtype)
    weights = small_integers(2, (32, 32), dtype)
    y, gradients = value_and_gradients(seq, weights)(({},), x, extra)
    assert_equal((y, gradients), (x + extra, (({},), weights, weights)))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extra_output_is_returned(dtype, in_place):
    seq = ops.Sequential(ops.MakeExtraOutput(in_place=in_place))
    x = small_integers(0, (32, 32), dtype)
    a, b = small_integers(1, x.shape, dtype), small_integers(2, x.shape, dtype)
    gradient = lambda cotangents: jax.vjp(lambda x: seq(({},), x), x)[1](cotangents)[0]  # noqa: E731
    assert_equal(seq(({},), x), (x, x))
    assert_equal(gradient((a, b)), a + b)
    for used in (0, 1):
        loss = lambda x: jnp.sum(seq(({},), x)[used] * a)  # noqa: B023, E731
        assert_equal(jax.grad(loss)(x), a)


def test_arrays_of_the_caller_do_not_change():
    seq = ops.Sequential(
        ops.MakeExtraOutput(in_place=True), ops.AddExtraInput(in_place=True)
    )
    x, extra = small_integers(0, (4, 4)), small_integers(1, (4, 4))
    before = np.array(x), np.array(extra)
    y, residual = jax.jit(seq)(({}, {}), x, extra)
    assert_equal((y, residual), (x + extra, x))
    assert_equal((x, extra), before)


def test_identity_reshape_and_scale():
    x = small_integers(0, (2, 6))
    compare(
        (ops.Identity(), lambda p, x: x, x),
        (ops.Reshape((3, -1)), lambda p, x: x.reshape(3, 4), x),
        (ops.Reshape((-1,)), lambda p, x: x.reshape(12), x),
        (ops.ConstantScale(0.5), lambda p, x: 0.5 * x, x),
        (ops.ConstantScale(0.5), lambda p, x: 0.5 * x, x.astype("bfloat16")),
        exact=True,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype):
    x = normal(0, (3, 5, 8), dtype)
    compare(
        (ops.GELU(), lambda p, x: jax.nn.gelu(x), x),
        (ops.GELU(approximate=False), lambda p, x: jax.nn.gelu(x, False), x),
        (ops.ReLU(), lambda p, x: jax.nn.relu(x), x),
        (ops.SiLU(), lambda p, x: jax.nn.silu(x), x),
        (ops.SwiGLU(), lambda p, x: jax.nn.silu(x[..., :4]) * x[..., 4:], x),
        (ops.GEGLU(), lambda p, x: jax.nn.gelu(x[..., :4]) * x[..., 4:], x),
    )


def test_interleaved_gate_and_up_do_not_depend_on_the_number_of_ranks():
    x = normal(0, (4, 32))
    gate, up = (x.reshape(4, 8, 2, 2)[..., i, :].reshape(4, 16) for i in (0, 1))
    seq = ops.Sequential(ops.SwiGLU(glu_interleave_size=2))
    for num_ranks in (1, 2, 4, 8):
        specs = (({},), P(None, "tp"))
        y = on_ranks(seq, tp_mesh(num_ranks), specs, P(None, "tp"))(({},), x)
        np.testing.assert_allclose(y, jax.nn.silu(gate) * up, rtol=1e-6, atol=1e-6)


def rms_norm(params, x, gain=0.0):
    rstd = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x * rstd * (gain + params["scale"])


def layer_norm(params, x):
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    normalized = (x - mean) * lax.rsqrt(variance + 1e-5)
    return normalized * params["scale"] + params["bias"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x = normal(0, (3, 5, 16), dtype)
    scale, bias = normal(1, (16,)), normal(2, (16,))
    centered = lambda p, x: rms_norm(p, x, 1.0)  # noqa: E731
    compare(
        (ops.RMSNorm(16), rms_norm, x, {"scale": scale}),
        (ops.RMSNorm(16, zero_centered_gamma=True), centered, x, {"scale": scale}),
        (ops.LayerNorm(16), layer_norm, x, {"scale": scale, "bias": bias}),
    )


def test_vectors_do_not_need_the_promotion_of_ranks():
    seq = ops.Sequential(ops.LayerNorm(16), ops.RMSNorm(16), ops.Bias(16))
    params, x = seq.init(jax.random.key(0)), normal(0, (3, 5, 16))
    step = jax.grad(lambda params, x: jnp.sum(seq(params, x) ** 2), (0, 1))
    expected = step(params, x)
    with jax.numpy_rank_promotion("raise"):
        assert_equal(step(params, x), expected)


def test_initial_norms_only_normalize():
    key = jax.random.key(0)
    assert_equal(
        ops.LayerNorm(4).init(key), {"bias": jnp.zeros(4), "scale": jnp.ones(4)}
    )
    assert_equal(
        ops.RMSNorm(4, zero_centered_gamma=True, param_dtype="bfloat16").init(key),
        {"scale": jnp.zeros(4, "bfloat16")},
    )


def test_norm_gradient_is_summed_over_token_shards():
    seq = ops.Sequential(ops.LayerNorm(16))
    params = ({"scale": normal(1, (16,)), "bias": normal(2, (16,))},)
    x, weights = normal(0, (8, 16)), small_integers(3, (8, 16))
    run = on_ranks(seq, tp_mesh(4), (seq.specs(), TOKENS), TOKENS)
    plain = lambda params, x: layer_norm(params[0], x)  # noqa: E731
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5),
        value_and_gradients(run, weights)(params, x),
        value_and_gradients(plain, weights)(params, x),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rounds_to_fp8_values(dtype):
    x = normal(0, (16, 16), dtype)
    y = ops.Sequential(ops.Quantize())(({},), x)
    assert y.dtype == x.dtype
    y, scale = np.asarray(y, np.float32), float(np.abs(np.asarray(x, "f4")).max()) / 448
    quantized = jnp.asarray(y / scale).astype(jnp.float8_e4m3fn)
    slack = scale * 448 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(quantized, np.float32) * scale, y, atol=slack)
    assert not np.array_equal(y, np.asarray(x, np.float32))
    np.testing.assert_allclose(y, np.asarray(x, np.float32), rtol=2**-4, atol=scale)


def test_quantize_passes_or_rounds_gradients():
    x, dy = normal(0, (16, 16)), normal(1, (16, 16))
    gradient = lambda op: jax.vjp(lambda x: ops.Sequential(op)(({},), x), x)[1](dy)[0]  # noqa: E731
    assert_equal(gradient(ops.Quantize()), dy)
    rounded = gradient(ops.Quantize(False, True))
    assert_equal(ops.Sequential(ops.Quantize(False, True))(({},), x), x)
    assert not np.array_equal(rounded, dy)
    np.testing.assert_allclose(rounded, dy, rtol=2**-3, atol=1e-6)
    assert_equal(ops.Sequential(ops.Quantize())(({},), 0 * x), 0 * x)


def test_ranks_may_share_one_quantization_scale():
    x = normal(0, (8, 16)) * jnp.arange(1, 9)[:, None]
    alone = ops.Sequential(ops.Quantize())
    shared = ops.Sequential(ops.Quantize(axis_name="tp"))
    run = on_ranks(shared, tp_mesh(4), (({},), TOKENS), TOKENS)
    expected = alone(({},), x)
    assert_equal(run(({},), x), expected)
    separate = on_ranks(alone, tp_mesh(4), (({},), TOKENS), TOKENS)
    assert not np.array_equal(separate(({},), x), expected)


def test_wrong_operands_are_rejected():
    x = jnp.ones((4, 6))

    def call(op, x, *extra, params=None):
        ops.Sequential(op)((params or {},), x, *extra)

    with pytest.raises(error, match=r"\(Bias\): Bias: bias has shape \(5,\)"):
        call(ops.Bias(5), x, params={"bias": jnp.ones(5)})
    with pytest.raises(
        error, match=r"the extra input has shape \(6,\), but here it is"
    ):
        call(ops.AddExtraInput(), x, jnp.ones(6))
    with pytest.raises(error, match=r"24 elements, which do not fit shape = \(5, -1\)"):
        call(ops.Reshape((5, -1)), x)
    with pytest.raises(error, match=r"do not fit shape = \(-1, -1\).*at most one"):
        call(ops.Reshape((-1, -1)), x)
    with pytest.raises(error, match="SwiGLU: x has shape .*into gate and up of equal"):
        call(ops.SwiGLU(), jnp.ones((4, 5)))
    with pytest.raises(
        error, match="into gate and up of blocks of 4 features.*multiple of 8 features"
    ):
        call(ops.GEGLU(glu_interleave_size=4), x)
    with pytest.raises(error, match="has 6 features, but the parameters are for 8"):
        call(ops.RMSNorm(8), x, params={"scale": jnp.ones(8)})
    for op in (ops.GELU(), ops.ConstantScale(2.0), ops.Quantize()):
        with pytest.raises(error, match=f"{op.label}: x is int32, but the op takes"):
            call(op, jnp.ones((4, 6), int))


@pytest.mark.parametrize("rate", [1.0, -0.1, "0.1", None, float("nan")])
def test_a_dropout_rate_is_in_zero_to_one(rate):
    text = f"Dropout: rate = {rate!r} is not a probability. Pass a number"
    with pytest.raises(error, match=text):
        ops.Dropout(rate)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ops.LayerNorm(16, eps="a"), "LayerNorm: eps = 'a' is not a number of"),
        (lambda: ops.RMSNorm(16, eps=-1), "RMSNorm: eps = -1 is not a number of at le"),
        (lambda: ops.RMSNorm((16,)), r"normalized_shape = \(16,\) is not a positive i"),
        (lambda: ops.LayerNorm(0), "normalized_shape = 0 is not a positive integer. P"),
        (lambda: ops.Bias("16"), "Bias: size = '16' is not a positive integer. Pass"),
        (
            lambda: ops.SwiGLU(glu_interleave_size=0),
            "SwiGLU: glu_interleave_size = 0 is not a positive integer. Pass the numbe",
        ),
    ],
)
def test_sizes_and_epsilons_are_numbers(make, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ops.RMSNorm(16, zero_centered_gamma="no"),
            "RMSNorm: zero_centered_gamma = 'no' is not a bool. Pass True or False.",
        ),
        (
            lambda: ops.Linear(4, 4, sequence_parallel="no"),
            "BasicLinear: sequence_parallel = 'no' is not a bool. Pass True or False.",
        ),
        (
            lambda: ops.Linear(4, 4, accumulate_into_main_grad="no"),
            "BasicLinear: accumulate_into_main_grad = 'no' is not a bool. Pass True",
        ),
    ],
)
def test_flags_are_bools(make, text):
    with pytest.raises(ub.errors.UnknownNameError, match=text):
        make()


@pytest.mark.parametrize("scale", ["2", None, jnp.float32(2)])
def test_a_scale_is_a_python_number(scale):
    with pytest.raises(error, match=r"ConstantScale: scale = .*Pass a Python number"):
        ops.ConstantScale(scale)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("kind", [ops.SwiGLU, ops.GEGLU])
def test_gated_activations_take_an_empty_array(kind, block):
    run = ops.Sequential(kind(glu_interleave_size=block))
    y, transposed = jax.vjp(lambda x: run(({},), x), jnp.zeros((0, 3, 8)))
    assert y.shape == (0, 3, 4)
    assert transposed(y)[0].shape == (0, 3, 8)


def test_a_numpy_scale_does_not_promote_the_dtype():
    scaled = ops.Sequential(ops.ConstantScale(np.float32(0.5)))
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert scaled((({}),), x).dtype == x.dtype


def test_a_scale_is_not_rounded_to_the_dtype_of_x():
    x = jnp.array([0.0, 0.5, 4096.0], jnp.float16)
    # As float16 numbers, the scales would be infinite and zero.
    for scale, factor in ((1e5, x / 4096), (1e-7, x)):
        expected = (factor.astype(jnp.float32) * scale).astype(x.dtype)
        run = lambda x: ops.Sequential(ops.ConstantScale(scale))(({},), x)  # noqa: B023, E731
        y, transposed = jax.vjp(run, factor)
        assert_equal((y, transposed(factor)[0]), (expected, expected))


@pytest.mark.parametrize("shape", [128, "a", (2, "a"), (-2, -4), (4, -3), None])
def test_a_shape_is_a_tuple_of_sizes(shape):
    with pytest.raises(error, match=r"Reshape: shape = .*is not a tuple of sizes"):
        ops.Reshape(shape)
