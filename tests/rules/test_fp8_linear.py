"""`ub.linear(fp8=recipe)`: a layer that quantizes its operands and gradients."""

import functools

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from layouts import whole
from operands import assert_equal, normal
from programs import (
    calls,
    collectives,
    compiled_text,
    on_ranks,
    scale_calls,
    tp_mesh,
)
from scaled_operands import (
    COLUMN,
    COLUMNS,
    FP8,
    LOCAL,
    METHODS,
    MODES,
    PASSED_ON,
    RECIPES,
    ROW,
    ROWS,
    SPECS,
    SUM,
    assert_exact,
    check_main_grad,
    integers,
    on_tp,
    operands,
    plain,
    value_and_gradients,
)

import jax_ub as ub
from jax_ub.errors import (
    ConfigurationError,
    ShapeContractError,
    UnsupportedOverlapError,
)

CURRENT, DELAYED = FP8.Float8CurrentScaling(), FP8.DelayedScaling(amax_history_len=3)
# Four ranks have blocks of 32 output features each.
FEATURES = {recipe: 128 if recipe == "block" else 8 for recipe in RECIPES}


def layer(mode, recipe, **options):
    """Returns a function (x, w, b, state=None) that calls `ub.linear` with a recipe."""
    parallel, sequence_parallel = mode

    def call(x, w, b, state=None):
        if state is None:
            state = FP8.init_state(recipe) or None
        return ub.linear(
            x,
            w,
            b,
            parallel=parallel,
            sequence_parallel=sequence_parallel,
            axis_name="tp" if parallel else None,
            fp8=recipe,
            fp8_state=state,
            **options,
        )

    return call


@pytest.mark.filterwarnings("ignore:.* not of the FP8 state")  # it is a constant here
@covering(2, mode=MODES, recipe=PASSED_ON, check_vma=[True, False])
def test_values_and_gradients_are_exact(mode, recipe, check_vma):
    function = on_tp(mode, layer(mode, RECIPES[recipe]), check_vma=check_vma)
    values = operands(num_features=FEATURES[recipe])
    if check_vma or mode in (COLUMN, ROW):
        assert_exact(function, values)
        return
    # Gradients of replicated operands follow JAX's convention for check_vma=False.
    assert_equal(function(*values), plain(*values).astype("bfloat16"))


@covering(
    2, mode=[COLUMN, ROW, SUM], recipe=["current", "block", "row"], method=METHODS
)
def test_all_passes_multiply_fp8_by_every_method(mode, recipe, method):
    function = on_tp(mode, layer(mode, RECIPES[recipe], method=method), 2)
    values = operands(num_features=FEATURES[recipe])
    ub.fallbacks(clear=True)
    text = assert_exact(function, values)
    assert not ub.fallbacks(clear=True)
    lines = [line for line in text.splitlines() if "custom-call(" in line]
    lines = [line for line in lines if "has_scales = 1" in line]
    assert len(lines) == (0 if method == "xla" else 3)
    # The forward pass multiplies e4m3; dgrad and wgrad also read e5m2 gradients, or
    # e4m3 gradients if scales belong to rows or blocks.
    if method != "xla":
        assert sum("f8e5m2[" in line for line in lines) == 2 * (recipe == "current")
        assert all("f8e4m3fn[" in line for line in lines)


@covering(method=["bulk", "ring_exchange"], recipe=["current", "block", "row"])
def test_gradients_by_a_configured_method(method, recipe):
    mesh = tp_mesh(2)
    names = {"qkv_dgrad": {"method": method}}
    if method == "bulk":
        names["qkv_wgrad"] = {"method": "bulk"}
    ub.destroy_ub()  # in several processes, `tp_mesh` has initialized the axis
    ub.initialize_ub((1024, 128), 2, ub_cfgs=names, mesh=mesh)
    function = on_tp(COLUMN, layer(COLUMN, RECIPES[recipe], ub_name="qkv"), 2)
    values = operands(num_features=FEATURES[recipe])
    found = calls(assert_exact(function, values))
    is_bulk = method == "bulk"
    assert found["bulk_all_gather"] == found["bulk_reduce_scatter"] == is_bulk
    assert found["matmul_reduce_scatter"] == (not is_bulk)


def amaxes(num_values):
    return jnp.repeat(jnp.asarray([1.0, 100.0, 1e4, 3.0]), num_values // 4)


@covering(mode=[COLUMN, ROW, SUM], recipe=[CURRENT, FP8.Float8CurrentScaling(True)])
def test_ranks_whose_values_differ_10000_fold_equal_one_rank(mode, recipe):
    x, w, b = normal(0, (8, 128)), normal(1, (128, 8)), normal(2, (8,))
    if mode is COLUMN:
        x, w = x * amaxes(8)[:, None], w * amaxes(8)
    else:
        x, w = x * amaxes(128), w * amaxes(128)[:, None]
    found = value_and_gradients(on_tp(mode, layer(mode, recipe)), x, w, b)
    dy = integers(9, (8, 8), "float32")

    def dequantized(value, role):
        q = ub.quantize(value, recipe, role=role)
        return formulas.dequantize(q.values, q.scales)

    a, kernel = dequantized(x, "input"), dequantized(w, "kernel")
    g = dequantized(dy, "output_grad")

    def close(found, left, right, addend=0.0):
        bound = 150 * 2.0**-24 * (np.abs(left) @ np.abs(right) + np.abs(addend))
        assert np.all(np.abs(left @ right + addend - whole(found)) <= bound)

    y, (dx, dw, db) = found
    close(y, a, kernel, np.asarray(b))
    close(dx, g, kernel.T)
    close(dw, a.T, g)
    # The bias is not quantized, so its gradient is exact.
    assert_equal(db, jnp.sum(dy, 0))


@pytest.mark.parametrize("mode", [COLUMN, ROW])
def test_one_collective_agrees_on_the_scales_of_each_pass(mode):
    values = operands()
    forward = on_tp(mode, layer(mode, CURRENT))

    def loss(*values):
        return jnp.sum(forward(*values).astype("float32") ** 2)

    def num_calls(function):
        return scale_calls(compiled_text(function, *values))

    assert num_calls(forward) == 1
    assert num_calls(jax.jit(jax.grad(loss, (0, 1)))) == 2


def test_one_collective_updates_the_states_of_all_layers():
    x, w, _ = operands("float32", 128)
    state = FP8.init_state(DELAYED)

    def layers(x, w, states):
        options = {"axis_name": "tp", "fp8": DELAYED}
        y = ub.all_gather_matmul(x, w, fp8_state=states[0], **options)
        return ub.matmul_reduce_scatter(y, w.T, fp8_state=states[1], **options)

    run = on_ranks(layers, tp_mesh(4), (ROWS, COLUMNS, P()), ROWS)

    def loss(states):
        return jnp.sum(run(x, w, states) ** 2)

    text = compiled_text(jax.jit(jax.grad(loss)), [state, state])
    assert collectives(text) == {"all-reduce": 1}
    assert scale_calls(text) == 0


@pytest.mark.parametrize("mode", [COLUMN, SUM, *nightly(ROW, ("column", False), LOCAL)])
def test_the_gradient_of_the_state_is_its_new_value(mode):
    values = operands("float32")
    function = layer(mode, DELAYED)

    def step(x, w, b, state):
        def loss(state):
            y = function(x, w, b, state)
            return jnp.sum(y * 3.0)

        return FP8.apply_updates(state, jax.grad(loss)(state))

    specs, _ = SPECS[mode]
    spec = jax.sharding.PartitionSpec()
    run = on_ranks(step, tp_mesh(4), (*specs, spec), spec)
    state = FP8.init_state(DELAYED)
    for _ in range(2):
        state = run(*values, state)
    x, w, _ = values
    for role, amax in (
        ("input", jnp.max(jnp.abs(x))),
        ("kernel", jnp.max(jnp.abs(w))),
        ("output_grad", 3.0),
    ):
        assert_equal(state[f"{role}_amax_history"], jnp.asarray([amax, 0, amax]))
        largest = 57344 if role == "output_grad" else 448
        np.testing.assert_allclose(state[f"{role}_scale"], amax / largest, rtol=1e-6)


def test_a_state_is_carried_through_microbatches():
    x, w, b = operands("float32")

    def step(state, scale):
        def loss(w, state):
            return jnp.sum(ub.linear(x * scale, w, b, fp8=DELAYED, fp8_state=state))

        dw, new = jax.grad(loss, (0, 1))(w, state)
        return FP8.apply_updates(state, new), dw

    scales = jnp.asarray([1.0, 2.0, 4.0])
    state, _ = jax.lax.scan(step, FP8.init_state(DELAYED), scales)
    amax = jnp.max(jnp.abs(x))
    assert_equal(state["input_amax_history"], amax * jnp.asarray([4.0, 1.0, 2.0]))


def test_residuals_have_one_byte_per_element():
    x, w, _ = operands()
    _, vjp = jax.vjp(functools.partial(ub.linear, fp8=CURRENT), x, w)
    found = {leaf.shape: leaf.dtype for leaf in jax.tree.leaves(vjp)}
    assert found[8, 128] == found[128, 8] == jnp.uint8


def test_a_policy_saves_fp8_residuals_by_name():
    x, w, _ = operands()

    def casts(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        function = jax.checkpoint(
            lambda x, w: jnp.sum(jnp.sin(ub.linear(x, w, fp8=CURRENT))), policy=policy
        )
        text = str(jax.make_jaxpr(jax.grad(function, (0, 1)))(x, w))
        return text.count("= jax_ub_cast[dtype=float8_e4m3fn]")

    # One cast each of x and w, and a second one where they are computed again.
    assert casts("jax_ub.x", "jax_ub.w") == 2
    assert casts("jax_ub.x") == 3
    assert casts() == 4


E4M3 = FP8.Float8CurrentScaling(fp8_format=FP8.Format.E4M3)


@pytest.mark.parametrize(
    ("recipe", "of_gradients"),
    [
        (CURRENT, 0.059),
        (E4M3, 0.037),
        (FP8.MXFP8BlockScaling(), 0.037),
        (FP8.RowwiseScaling(), 0.037),
    ],
)
def test_errors_of_the_documentation(recipe, of_gradients):
    x, w, dy = (normal(seed, (256, 256)) for seed in range(3))
    wanted = x @ w, dy @ w.T, x.T @ dy
    y, backward = jax.vjp(functools.partial(ub.linear, fp8=recipe), x, w)
    for found, exact, documented in zip(
        (y, *backward(dy)), wanted, (0.037, of_gradients, of_gradients), strict=True
    ):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert abs(error - documented) < 0.002


@covering(recipe=["current", "block"], policy=["names", "everything"])
def test_a_policy_that_saves_fp8_residuals_changes_no_value(recipe, policy):
    x, w = normal(0, (8, 64)), normal(1, (64, 32))
    policies = jax.checkpoint_policies
    saves = {
        "names": policies.save_only_these_names("jax_ub.x", "jax_ub.w"),
        "everything": policies.everything_saveable,
    }

    def loss(x, w):
        return jnp.sum(jnp.sin(ub.linear(x, w, fp8=RECIPES[recipe])))

    saving = jax.checkpoint(loss, policy=saves[policy])
    found, wanted = (
        jax.jit(jax.value_and_grad(each, (0, 1)))(x, w) for each in (saving, loss)
    )
    jax.tree.map(assert_equal, found, wanted)


@pytest.mark.parametrize("recipe", ["delayed", *nightly("row", "current", "block")])
def test_several_kernels_and_a_residual(recipe):
    options = {"axis_name": "tp", "fp8": RECIPES[recipe]}

    def mlp(x, w1, w2, w3, residual):
        first, second = (FP8.init_state(RECIPES[recipe]) or None for _ in range(2))
        u, v = ub.all_gather_matmul(x, (w1, w2), fp8_state=first, **options)
        # The sums are exact in FP8 again.
        y = jnp.sign(u) + jnp.sign(v)
        return ub.matmul_reduce_scatter(
            y, w3, residual=residual, fp8_state=second, **options
        )

    specs = (ROWS, COLUMNS, COLUMNS, ROWS, ROWS)
    function = on_ranks(mlp, tp_mesh(2), specs, ROWS)
    x, w, _ = operands("float32")
    w1, w2 = (integers(seed, (128, 64), "float32") for seed in (3, 4))
    w3, residual = integers(5, (64, 32), "float32"), integers(6, (8, 32), "float32")

    def plain_mlp(x, w1, w2, w3, residual):
        dot = functools.partial(jnp.matmul, precision="highest")
        return dot(jnp.sign(dot(x, w1)) + jnp.sign(dot(x, w2)), w3) + residual

    values = x, w1, w2, w3, residual
    found, wanted = function(*values), plain_mlp(*values)
    # The signs of sums that are rounded in another order are equal: the sums are exact.
    assert_equal(found, wanted)


@pytest.mark.filterwarnings("ignore:.*but not of the FP8 state")
@pytest.mark.parametrize("recipe", ["block", *nightly("current", "delayed", "row")])
def test_gradients_of_several_kernels_are_exact(recipe):
    def layer(x, w1, w2):
        state = FP8.init_state(RECIPES[recipe]) or None
        return jnp.concatenate(
            ub.all_gather_matmul(
                x,
                (w1, w2),
                axis_name="tp",
                fp8=RECIPES[recipe],
                fp8_state=state,
                out_dtype="float32",
            ),
            1,
        )

    function = on_ranks(layer, tp_mesh(2), (ROWS, COLUMNS, COLUMNS), COLUMNS)
    x, w, _ = operands("float32", FEATURES[recipe])
    values = x, w, integers(3, w.shape, "float32")

    def wanted(x, w1, w2):
        halves = [jnp.split(plain(x, w, 0.0), 2, 1) for w in (w1, w2)]
        return jnp.concatenate(
            [h for pair in zip(*halves, strict=True) for h in pair], 1
        )

    found, expected = (value_and_gradients(f, *values) for f in (function, wanted))
    jax.tree.map(assert_equal, found, expected)


@pytest.mark.parametrize("recipe", ["current", "row"])
def test_main_grad_accumulates(recipe):
    options = {"parallel": "row", "axis_name": "tp", "fp8": RECIPES[recipe]}
    check_main_grad(lambda x, w, m: ub.linear(x, w, main_grad=m, **options))


X, W = (value.astype("float32") for value in operands()[:2])
Q = [ub.ScaledArray(v.astype(jnp.float8_e4m3fn), np.float32(1)) for v in (X, W)]
WRONG = {
    "no recipe": (
        ConfigurationError,
        "linear: fp8 = 'hybrid' is not",
        X,
        W,
        {"fp8": "hybrid"},
    ),
    "FP8 already": (
        ShapeContractError,
        "linear: x is FP8 already, but fp8 = Float8CurrentScaling quantizes it. Leave",
        *Q,
        {"fp8": CURRENT},
    ),
    "state without recipe": (
        ConfigurationError,
        "linear: fp8_state without fp8. Pass fp8=recipe, or leave out fp8_state",
        X,
        W,
        {"fp8_state": {}},
    ),
    "no state": (
        ConfigurationError,
        "linear: DelayedScaling needs a state, but fp8_state is None. Pass one from",
        X,
        W,
        {"fp8": DELAYED},
    ),
    "superfluous state": (
        ConfigurationError,
        "linear: Float8CurrentScaling has no state, but fp8_state = ",
        X,
        W,
        {"fp8": CURRENT, "fp8_state": FP8.init_state(DELAYED)},
    ),
    "no float": (ShapeContractError, "linear: x", X.astype(int), W, {"fp8": CURRENT}),
    "blocks": (
        ShapeContractError,
        "linear: K = 80 is no multiple of 32, which MXFP8 needs. Pad K",
        np.ones((8, 80), "float32"),
        np.ones((80, 8), "float32"),
        {"fp8": FP8.MXFP8BlockScaling()},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong):
    error, text, x, w, options = WRONG[wrong]
    with pytest.raises(error, match=text):
        ub.linear(x, w, **options)


def test_a_state_of_two_calls_is_rejected():
    def loss(state):
        y = ub.linear(X, W, fp8=DELAYED, fp8_state=state)
        return jnp.sum(ub.linear(y, W.T, fp8=DELAYED, fp8_state=state))

    text = r"this FP8 state went into another .* Pass jax\.lax\.stop_gradient\(state\)"
    with pytest.raises(ShapeContractError, match=text):
        jax.grad(loss)(FP8.init_state(DELAYED))


def test_a_call_with_stop_gradient_of_the_state_does_not_update_it():
    @jax.jit
    def loss(state):
        frozen = jax.lax.stop_gradient(state)
        pairs = (X, state), (100 * X, frozen)
        return sum(
            jnp.sum(ub.linear(x, W, fp8=DELAYED, fp8_state=each)) for x, each in pairs
        )

    new = jax.grad(loss)(FP8.init_state(DELAYED))
    assert_equal(new["input_amax_history"], jnp.max(jnp.abs(X)) * jnp.eye(3)[0])


def test_gradients_with_blocks_need_whole_blocks_of_output_features():
    def loss(w):
        return jnp.sum(ub.linear(X, w, fp8=RECIPES["block"]))

    loss(W)
    text = "linear: N = 8 is no multiple of 32, which MXFP8 needs. Pad N, or use"
    with pytest.raises(ShapeContractError, match=text):
        jax.grad(loss)(W)


@covering(is_jitted=[True, False], inner=[lambda f: f, jax.jit, jax.checkpoint])
def test_vmap_must_map_the_state_with_x(is_jitted, inner):
    xs, state = jnp.stack([X, 2 * X]), FP8.init_state(DELAYED)

    def loss(x, state):
        return jnp.sum(ub.linear(x, W, fp8=DELAYED, fp8_state=state))

    step = jax.grad(inner(loss), 1)
    step = jax.jit(step) if is_jitted else step
    text = (
        "linear: jax.vmap maps x but not its FP8 state, and JAX would add the new "
        "states of 2 examples. Put the examples into batch axes of x"
    )
    with pytest.raises(UnsupportedOverlapError, match=text):
        jax.vmap(step, (0, None))(xs, state)
    states = jax.tree.map(lambda array: jnp.stack([array, array]), state)
    found = jax.vmap(step)(xs, states)["input_amax_history"][:, 0]
    amax = jnp.max(jnp.abs(X))
    assert_equal(found, jnp.stack([amax, 2 * amax]))
    # A batch axis has one state.
    found = step(xs, state)["input_amax_history"][0]
    assert_equal(found, 2 * amax)
