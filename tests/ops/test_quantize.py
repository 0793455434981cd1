"""`ops.Quantize`: FP8 tensors that pass from one operation to the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from ops_on_ranks import TOKENS, random_params
from programs import call_lines, calls, compiled_text, equations, on_ranks, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES
from scaled_operands import DELAYED, PASSED_ON

import jax_ub as ub
from jax_ub import ops
from jax_ub.errors import ConfigurationError, ShapeContractError

CURRENT, ROWS = ub.fp8.Float8CurrentScaling(), ub.fp8.RowwiseScaling()
# The maxima of the ranks differ.
X = normal(0, (16, 64)) * np.arange(1, 17, dtype="float32")[:, None]
QUANTIZE, BOTH = ops.Quantize(), ops.Quantize(True, True)
GRADIENT = ops.Quantize(False, True)


def linear(mode, size_in, size_out, recipe, name=None, **options):
    if name is not None:
        options["userbuffers_options"] = {"comm_name": name}
    return ops.Linear(
        size_in,
        size_out,
        tensor_parallel_mode=mode,
        sequence_parallel=mode is not None,
        fp8=recipe,
        **options,
    )


def step_of(seq, num_ranks=2):
    """Returns a function (params, x) -> y and gradients on ranks."""
    layer = on_ranks(seq, tp_mesh(num_ranks), (seq.specs(), TOKENS), TOKENS)

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(y * normal(9, y.shape)), y

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    return lambda params, x: gradient(params, x)[::-1]


def num_casts(step, *operands):
    """Returns how many arrays a function converts to FP8."""
    return sum(
        equation.primitive.name == "jax_ub_cast"
        for equation in equations(step, *operands)
    )


@covering(
    recipe=["delayed", *nightly("current", "block", "row")],
    fused=[True, *nightly(False)],
)
def test_linears_use_quantized_tensors_without_a_second_cast(recipe, fused):
    """Results, gradients and states are those of the linears alone."""
    names = ("fc1", "fc2") if fused else (None, None)
    first = linear("column", 64, 128, RECIPES[recipe], names[0], use_bias=False)
    second = linear("row", 128, 64, RECIPES[recipe], names[1], use_bias=False)
    ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    alone = ops.Sequential(first, ops.ReLU(), second)
    with_all = ops.Sequential(
        QUANTIZE, first, GRADIENT, ops.ReLU(), QUANTIZE, second, GRADIENT
    )
    a, _, b = params = random_params(alone)
    more = ({}, a, {}, {}, {}, b, {})
    y, (gradients, dx) = jax.jit(step_of(alone))(params, X)
    found_y, (found, found_dx) = jax.jit(step_of(with_all))(more, X)
    assert_equal((found_y, found_dx), (y, dx))
    assert_equal((found[1], found[5]), (gradients[0], gradients[2]))
    casts = num_casts(step_of(alone), params, X)
    assert num_casts(step_of(with_all), more, X) == casts == 6


def test_another_recipe_than_that_of_the_linear():
    seq = ops.Sequential(
        ops.Quantize(fp8=ROWS), linear(None, 64, 32, CURRENT, use_bias=False)
    )
    params = random_params(seq)
    kernel = params[1]["kernel"]
    expected = ub.linear(
        ub.quantize(X, ROWS), ub.quantize(kernel, CURRENT, role="kernel")
    )
    assert_equal(seq(params, X), expected)
    dx = jax.grad(lambda x: jnp.sum(seq(params, x) ** 2))(X)
    wide = jax.grad(lambda x: jnp.sum((x @ kernel) ** 2))(X)
    assert jnp.linalg.norm(dx - wide) < 0.1 * jnp.linalg.norm(wide)


@pytest.mark.parametrize("num_ranks", [2, *nightly(1)])
def test_the_recipes_of_x_and_of_the_linear_may_have_other_kinds_of_scales(num_ranks):
    """The kernel's gradient multiplies scales of rows by scales of blocks."""
    blocks, errors = RECIPES["block"], []
    for first, second in ((ROWS, blocks), (blocks, ROWS)):
        layer = linear("column", 64, 64, second, use_bias=False)
        seq = ops.Sequential(ops.Quantize(fp8=first), layer)
        params = random_params(seq)
        function = on_ranks(
            seq, tp_mesh(num_ranks), (seq.specs(), TOKENS), P(None, "tp")
        )
        dy = normal(9, (16, 64))
        _, backward = jax.vjp(function, params, X)
        (_, gradients), dx = backward(dy)
        wanted = X.T @ dy, dy @ params[1]["kernel"].T
        for found, exact in zip((gradients["kernel"], dx), wanted, strict=True):
            errors.append(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    assert max(errors) < 0.1


@covering(pair=["row current", "current row", "current block"], is_bulk=[True, False])
def test_a_scale_per_tensor_multiplies_f32_sums(pair, is_bulk):
    """The other operand has scales of rows, which multiply its values as bf16."""
    first, second = (RECIPES[name] for name in pair.split())
    if is_bulk:
        ub.initialize_ub((16, 64), 2, use_fp8=True, mesh=tp_mesh(2))
    options = {"use_bias": False, "accumulate_into_main_grad": True}
    layer = linear("column", 64, 64, second, "qkv" if is_bulk else None, **options)
    seq = ops.Sequential(ops.Quantize(fp8=first), layer)
    params = random_params(seq)
    function = on_ranks(seq, tp_mesh(2), (seq.specs(), TOKENS), P(None, "tp"))
    dy = normal(9, (16, 64))

    def step(params, x, dy):
        return jax.vjp(function, params, x)[1](dy)[0]

    shards = (ub.quantize(dy, second, role="output_grad"),)
    if second is RECIPES["row"]:
        halves = jnp.split(dy, 2, 1)
        shards = [ub.quantize(half, second, role="output_grad") for half in halves]
    wide = [np.float64(each.dequantize()) for each in (ub.quantize(X, first), *shards)]
    wanted = params[1]["main_grad"] + wide[0].T @ np.concatenate(wide[1:], 1)
    _, found = jax.jit(step)(params, X, dy)
    error = np.linalg.norm(found["main_grad"] - wanted) / np.linalg.norm(wanted)
    assert error < 1e-6
    bulk = calls(compiled_text(jax.jit(step), params, X, dy))["bulk_reduce_scatter"]
    assert bulk == is_bulk


def test_a_row_of_each_rank_keeps_its_scale():
    """One row per rank has one row scale, which is not the scale of the tensor."""
    seq = ops.Sequential(
        ops.Quantize(fp8=ROWS), linear("column", 64, 32, CURRENT, use_bias=False)
    )
    params = random_params(seq)
    x = jnp.concatenate([X[:1], 1000 * X[1:2]])
    y = on_ranks(seq, tp_mesh(2), (seq.specs(), TOKENS), P(None, "tp"))(params, x)
    wide = x @ params[1]["kernel"]
    for row, wanted in zip(y, wide, strict=True):
        assert jnp.linalg.norm(row - wanted) < 0.1 * jnp.linalg.norm(wanted)


def all_gather_line(function, *operands):
    """Returns the custom call of the one all-gather in a jitted function."""
    lines = call_lines(compiled_text(function, *operands))
    (line,) = [line for line in lines if "jax_ub$all_gather" in line]
    return line


@pytest.mark.parametrize("recipe", PASSED_ON)
def test_an_all_gather_sends_one_byte_per_element(recipe):
    recipe = RECIPES[recipe]
    layer = linear(None, 64, 32, recipe, use_bias=False)
    plain = ops.Sequential(ops.AllGather(), layer)
    seq = ops.Sequential(QUANTIZE, ops.Identity(), ops.AllGather(), layer)
    params = random_params(plain)
    more = ({}, {}, {}, params[1])

    def call(seq, params):
        specs = jax.tree.map(lambda _: P(), params)
        options = {"check_vma": False}
        return on_ranks(seq, tp_mesh(2), (specs, TOKENS), P(), **options)

    assert_equal(call(seq, more)(more, X), call(plain, params)(params, X))
    gather = all_gather_line(call(seq, more), more, X)
    assert "f8e4m3fn[" in gather
    assert "f32[" not in gather


def test_the_gradient_of_a_reduce_scatter_is_sent_as_fp8():
    layer = linear(None, 64, 32, CURRENT, use_bias=False)
    scatter = ops.ReduceScatter()
    plain = ops.Sequential(layer, scatter)
    seq = ops.Sequential(layer, scatter, GRADIENT)
    params = random_params(plain)

    def step(seq, params):
        def loss(params, x):
            y = seq(params, x)
            return jnp.sum(y * normal(9, (8, 32))), y

        specs = jax.tree.map(lambda _: P(), params)
        gradient = lambda *operands: jax.grad(loss, (0, 1), has_aux=True)(*operands)  # noqa: E731
        out = ((specs, P()), TOKENS)
        return on_ranks(gradient, tp_mesh(2), (specs, P()), out, check_vma=False)

    assert_equal(
        step(seq, (*params, {}))((*params, {}), X)[0][0][:2],
        step(plain, params)(params, X)[0][0],
    )
    assert "f8e5m2[" in all_gather_line(step(seq, (*params, {})), (*params, {}), X)


def dequantized(x, recipe=None):
    return ub.quantize(x, recipe).dequantize(x.dtype)


@pytest.mark.parametrize("recipe", [None, ROWS])
def test_other_operations_get_the_dequantized_array(recipe):
    wide = linear(None, 64, 32, None)
    for op in (ops.ReLU(), wide, ops.AddExtraInput(), ops.Reshape((-1, 32))):
        extras = (X,) if isinstance(op, ops.AddExtraInput) else ()
        seq = ops.Sequential(ops.Quantize(fp8=recipe), op)
        params = random_params(seq)
        assert_equal(
            seq(params, X, *extras),
            ops.Sequential(op)(params[1:], dequantized(X, recipe), *extras),
        )
        # The rounding has the gradient of the identity.
        dx = jax.grad(lambda x, s, p, e: jnp.sum(s(p, x, *e)))(X, seq, params, extras)
        alone = ops.Sequential(op)
        expected = jax.grad(lambda x, s, p, e: jnp.sum(s(p, x, *e)))(
            dequantized(X, recipe), alone, params[1:], extras
        )
        assert_equal(dx, expected)


def test_the_residual_of_a_quantized_activation_is_dequantized():
    skip = ops.MakeExtraOutput(in_place=True)
    layer = linear(None, 64, 64, CURRENT, use_bias=False)
    add = ops.AddExtraInput(in_place=True)
    seq = ops.Sequential(
        QUANTIZE,
        skip.with_extra_output_channel(0, "skip", False),
        layer,
        add.with_extra_input_channel(0, "skip"),
    )
    assert isinstance(
        ops.OperationFuser(seq).backward_ops[1], ops.fused.BackwardLinearAdd
    )
    params = random_params(seq)
    alone = ops.Sequential(layer)

    def plain(params, x):
        return dequantized(x) + alone(params, x)

    y = seq(params, X)
    np.testing.assert_allclose(y, plain(params[2:3], X), rtol=1e-5, atol=1e-5)
    dx = jax.grad(lambda x: jnp.sum(seq(params, x) * X))(X)
    expected = X + jax.grad(lambda x: jnp.sum(alone(params[2:3], x) * X))(X)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-4)


def test_a_fused_operation_that_the_caller_made_gets_the_state_of_the_linear():
    both = ops.Quantize(), ops.BasicLinear(64, 64, fp8=DELAYED), BOTH
    params = ops.Sequential(*both).init(jax.random.key(0))

    def step(params, *entries):
        def loss(params, x):
            y = ops.Sequential(*entries)(params, x)
            return jnp.sum(y * X), y

        return jax.grad(loss, (0, 1), has_aux=True)(params, X)

    (dp, dx), y = step(params, *both)
    fused = step((params,), ops.FusedOperation(both))
    assert_equal(fused, (((dp,), dx), y))
    history = dp[1]["input_amax_history"]
    assert history[0] == jnp.max(jnp.abs(X))


def test_own_state_of_delayed_scaling():
    layer = linear(None, 64, 32, DELAYED)
    seq = ops.Sequential(ops.Quantize(True, True, fp8=DELAYED), layer, GRADIENT)
    weights, states = ops.split_fp8_states(random_params(seq))
    roles = {"input", "output_grad"}
    assert {*states[0]} == {
        f"{role}_{name}" for role in roles for name in ("scale", "amax_history")
    }

    def loss(states, x):
        return jnp.sum(seq(ops.merge_fp8_states(weights, states), x))

    for _ in range(2):
        new = jax.jit(jax.grad(loss))(states, X)
        states = ub.fp8.apply_updates(states, new)
    largest = jnp.max(jnp.abs(X))
    assert_equal(states[0]["input_amax_history"], jnp.full(2, largest))
    assert states[0]["input_scale"][0] == largest / 448
    assert np.all(states[0]["output_grad_amax_history"] > 0)
    # The linear has not quantized its input, but its kernel and its gradient.
    assert not np.any(states[1]["input_amax_history"])
    assert np.all(states[1]["kernel_amax_history"] > 0)
    assert_equal(states[1]["output_grad_amax_history"], jnp.ones(2))


def test_transformations():
    layer = linear(None, 64, 64, CURRENT)
    seq = ops.Sequential(QUANTIZE, layer, BOTH, layer)
    params = random_params(seq)
    loss = lambda params, x: jnp.sum(seq(params, x) ** 2)  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1)))(params, X)
    rematerialized = jax.grad(jax.checkpoint(loss), (0, 1))
    assert_equal(jax.jit(rematerialized)(params, X), gradients)
    only_dx = jax.jit(jax.grad(loss, 1))(params, X)
    assert_equal(only_dx, gradients[1])
    batch = jnp.stack([X, 2 * X])
    each = jax.jit(jax.vmap(functools.partial(seq, params)))(batch)
    np.testing.assert_allclose(each[1], seq(params, 2 * X), rtol=1e-5, atol=1e-4)
    assert ops.Sequential(QUANTIZE).init(jax.random.key(0)) == ({},)
    assert repr(ops.OperationFuser(seq).basic_ops[0]) == "Quantize()"


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="Quantize: fp8 = 'hybrid' is"):
        ops.Quantize(fp8="hybrid")
    seq = ops.Sequential(ops.Quantize(fp8=ub.fp8.MXFP8BlockScaling()), ops.ReLU())
    text = "Quantize: K = 48 is no multiple of 32, which MXFP8 needs. Pad K, or use"
    with pytest.raises(ShapeContractError, match=text):
        seq(({}, {}), jnp.ones((4, 48)))
