"""FP8 operands under JAX's transformations; residuals and state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal
from programs import compiled_text, on_ranks, scale_calls, tp_mesh
from scaled_operands import (
    COLUMN,
    COLUMNS,
    LOCAL,
    PASSED_ON,
    RECIPES,
    ROW,
    ROWS,
    SPECS,
    assert_exact,
    integers,
    linear,
    on_tp,
    operands,
    plain,
    quantized,
    value_and_gradients,
)

import jax_ub as ub

MODES = [COLUMN, ROW, LOCAL]


def pair(recipe, x, w1, w2):
    """Computes a column-parallel and a row-parallel layer."""
    zeros = jnp.zeros(w1.shape[1], x.dtype), jnp.zeros(w2.shape[1], x.dtype)
    y = linear(COLUMN, recipe)(x, w1, zeros[0])
    return linear(ROW, recipe)(y, w2, zeros[1])


def kernels(num_layers=2):
    """Returns kernels of layers 32 -> 128 -> 32 with one 1 or -1 in each column."""
    one = np.random.default_rng(0).choice([-1, 1], 128)
    w1 = np.where(np.arange(128) % 32 == np.arange(32)[:, None], one, 0)
    stack = [np.roll(w1, i, axis=0) for i in range(num_layers)]
    return tuple(
        jnp.asarray(np.stack(each), "bfloat16")
        for each in (stack, [np.where(np.arange(128) < 32, w, 0).T for w in stack])
    )


@covering(
    recipe=["block", *nightly("current", "delayed", "row")],
    wrap=[jax.checkpoint, *nightly(lambda f: f)],
)
def test_a_scan_over_layers(recipe, wrap):
    def model(x, w1, w2):
        def layer(x, ws):
            return pair(RECIPES[recipe], x, *ws), None

        return lax.scan(wrap(layer), x, (w1, w2))[0]

    specs = ROWS, P(None, None, "tp"), P(None, "tp")
    function = on_ranks(model, tp_mesh(4), specs, ROWS)
    x, (w1, w2) = integers(0, (8, 32)), kernels()

    def wanted(x, w1, w2):
        x, w1, w2 = (a.astype("float32") for a in (x, w1, w2))
        for i in range(2):
            x = x @ w1[i] @ w2[i]
        return x

    found = value_and_gradients(function, x, w1, w2)
    expected = value_and_gradients(wanted, x, w1, w2)
    assert_equal(found[0], expected[0].astype("bfloat16"))
    jax.tree.map(assert_equal, found[1], expected[1])


@covering(mode=MODES, recipe=["current", "block", "row"])
def test_vmap(mode, recipe):
    x, w, b = operands("float32")
    xs = jnp.stack([x, integers(3, x.shape, "float32")])
    (x_spec, *specs), out = SPECS[mode]
    layer = jax.vmap(linear(mode, RECIPES[recipe]), in_axes=(0, None, None))
    function = on_ranks(layer, tp_mesh(2), (P(None, *x_spec), *specs), P(None, *out))
    expected = value_and_gradients(jax.vmap(plain, (0, None, None)), xs, w, b)
    jax.tree.map(assert_equal, value_and_gradients(function, xs, w, b), expected)


@pytest.mark.parametrize("is_jitted", [True, False])
def test_quantized_arrays_enter_an_eager_shard_map(is_jitted):
    x, w, b = operands()
    x, w = quantized(RECIPES["row"], x, w, axis_name=None)
    function = jax.shard_map(
        lambda x, w, b: ub.all_gather_matmul(x, w, bias=b, axis_name="tp"),
        mesh=tp_mesh(2),
        in_specs=(ROWS, ub.ScaledArray(COLUMNS, COLUMNS, COLUMNS), P("tp")),
        out_specs=COLUMNS,
    )
    with jax.disable_jit(not is_jitted):
        y = function(x, w, b)
    assert_equal(y, plain(x.source, w.source, b).astype("bfloat16"))


def test_kernels_are_quantized_once_for_all_microbatches():
    x, w, b = operands()
    recipe = RECIPES["current"]

    def loss(w, xs):
        kernel = ub.fp8.quantize_params(w, recipe, axis_name="tp")

        def microbatch(total, x):
            x = ub.quantize(x, recipe, axis_name="tp")
            y = ub.matmul_reduce_scatter(x, kernel, axis_name="tp")
            return total + jnp.sum(y.astype("float32")), None

        zero = lax.pcast(jnp.float32(0), ("tp",), to="varying")
        return lax.psum(lax.scan(microbatch, zero, xs)[0], "tp")

    def step(w, xs):
        return on_ranks(loss, tp_mesh(2), (ROWS, P(None, None, "tp")), P())(w, xs)

    xs = jnp.stack([x, integers(3, x.shape)])
    gradient = jax.grad(step)(w, xs)
    sums = jnp.sum(xs.astype("float32"), 1).astype("bfloat16")
    expected = jnp.broadcast_to((sums[0] + sums[1])[:, None], w.shape)
    assert_equal(gradient, expected)
    text = str(jax.make_jaxpr(jax.grad(step))(w, xs))
    # w is quantized in front of the scan over the microbatches, x in it.
    conversion = r"f8_e4m3fn\[(\S+)\]\S* = jax_ub_cast"
    assert re.findall(conversion, text[: text.index("scan[")]) == ["64,8"]
    assert re.findall(conversion, text[text.index("scan[") :]) == ["8,64"]


def with_given_kernel(mode, recipe):
    """Returns a function (x, w, b, state) that quantizes only w before the layer."""

    def call(x, w, b, state):
        axis_name = "tp" if mode[0] else None
        w = ub.quantize(w, recipe, role="kernel", state=state, axis_name=axis_name)
        options = {"parallel": mode[0], "axis_name": axis_name}
        return ub.linear(x, w, b, fp8=recipe, fp8_state=state, **options)

    return call


@pytest.mark.filterwarnings("ignore:.* not of the FP8 state")  # it is a constant here
@covering(mode=MODES, recipe=PASSED_ON)
def test_a_recipe_leaves_kernels_that_are_fp8_already(mode, recipe):
    recipe = RECIPES[recipe]
    state = ub.fp8.init_state(recipe) or None
    layer = with_given_kernel(mode, recipe)
    function = on_tp(mode, lambda x, w, b: layer(x, w, b, state))
    num_features = 128 if recipe is RECIPES["block"] else 8
    text = assert_exact(function, operands(num_features=num_features))
    lines = [line for line in text.splitlines() if "has_scales = 1" in line]
    assert len(lines) == 3  # all passes multiply FP8


def test_a_state_is_that_of_a_given_kernel_and_of_its_layer():
    recipe = RECIPES["delayed"]
    x, w, b = operands("float32")
    state = ub.fp8.init_state(recipe)
    layer = with_given_kernel(LOCAL, recipe)
    new = jax.grad(lambda state: jnp.sum(3 * layer(x, w, b, state)))(state)
    for role, amax in (("input", x), ("kernel", w), ("output_grad", 3.0)):
        history = new[f"{role}_amax_history"]
        assert history.tolist() == [float(jnp.max(jnp.abs(amax))), 0.0]


def test_a_step_quantizes_kernels_once_and_activations_in_each_microbatch():
    recipe = RECIPES["current"]
    x, w, _ = operands()

    def step(w, xs):
        kernel = ub.fp8.quantize_params(w, recipe, axis_name="tp")

        def microbatch(main_grad, x):
            def loss(main_grad):
                y = ub.matmul_reduce_scatter(
                    x, kernel, axis_name="tp", fp8=recipe, main_grad=main_grad
                )
                return jnp.sum(y.astype("float32") ** 2)

            return jax.grad(loss)(main_grad), None

        zeros = jnp.zeros_like(w, "float32")
        return lax.scan(microbatch, zeros, xs)[0]

    xs = jnp.stack([x, integers(3, x.shape)])
    specs = ROWS, P(None, None, "tp")
    text = compiled_text(on_ranks(step, tp_mesh(2), specs, ROWS), w, xs)
    # The engine agrees on the scale of w, and in the loop on those of x and dy.
    loop = re.search(r"body=(%?[\w.\-]+)", text)[1]
    body = next(c for c in text.split("\n\n") if c.strip().startswith(loop))
    assert (scale_calls(body), scale_calls(text)) == (2, 3)


@pytest.mark.parametrize("mode", [COLUMN, *nightly(ROW, LOCAL)])
def test_residuals_have_one_byte_per_element(mode):
    x, w, b = operands()
    layer = on_tp(mode, linear(mode, RECIPES["row"]), 2)
    _, pull = jax.vjp(layer, x, w, b)
    sizes = [(str(leaf.dtype), leaf.size) for leaf in jax.tree.leaves(pull)]
    wide = [size for dtype, size in sizes if dtype != "uint8"]
    assert [size for dtype, size in sizes if dtype == "uint8"] == [1024] * 2
    assert max(wide) <= 128  # scales


@pytest.mark.parametrize("name", ["x", "qkv.x", "y"])
def test_residuals_have_checkpoint_names(name):
    x, w, b = operands()
    layer = on_tp(COLUMN, linear(COLUMN, RECIPES["block"], ub_name="qkv"), 2)
    policy = jax.checkpoint_policies.save_only_these_names(f"jax_ub.{name}")
    saving = jax.checkpoint(layer, policy=policy)
    _, pull = jax.vjp(saving, x, w, b)
    dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(pull)]
    # The bits of values and scales.
    assert dtypes.count("uint8") == (0 if name == "y" else 2)
    assert not [dtype for dtype in dtypes if dtype.startswith("float8")]


@pytest.mark.parametrize("mode", [COLUMN, *nightly(ROW)])
def test_the_gradient_of_a_state_is_its_new_value(mode):
    recipe = RECIPES["delayed"]
    x, w, b = operands("float32")
    state = ub.fp8.init_state(recipe)

    def layer(x, w, b, state):
        options = {"state": state, "axis_name": "tp"}
        x = ub.quantize(x, recipe, **options)
        w = ub.quantize(w, recipe, role="kernel", **options)
        return ub.linear(x, w, b, parallel=mode[0], axis_name="tp")

    in_specs, out_specs = SPECS[mode]
    function = on_ranks(layer, tp_mesh(2), (*in_specs, P()), out_specs)
    loss = jax.jit(jax.grad(lambda x, state: jnp.sum(function(x, w, b, state)), 1))
    new = ub.fp8.apply_updates(state, loss(x, state))
    for role, tensor in (("input", x), ("kernel", w)):
        history = new[f"{role}_amax_history"]
        assert history.tolist() == [float(jnp.max(jnp.abs(tensor))), 0.0]
        assert new[f"{role}_scale"] == 1.0
    new = ub.fp8.apply_updates(new, loss(x, new))
    assert new["input_scale"] == np.float32(1) / (np.float32(448) / jnp.max(jnp.abs(x)))
