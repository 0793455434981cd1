"""State of delayed scaling: its update is the gradient of the state."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from scaled_operands import with_maximum_as_sum

import jax_ub as ub

FP8 = ub.fp8


def step(recipe, role="input"):
    """Returns a function (state, x) -> (quantized, next state)."""

    @jax.jit
    def run(state, x):
        def loss(state):
            quantized = ub.quantize(x, recipe, role=role, state=state)
            return jnp.sum(quantized.dequantize(jnp.float32)), quantized

        gradient, quantized = jax.grad(loss, has_aux=True)(state)
        return quantized, FP8.apply_updates(state, gradient)

    return run


def run_steps(recipe, amaxes, role="input"):
    """Quantizes tensors of the given amaxes; returns scales and the last state."""
    run, state, scales = step(recipe, role), FP8.init_state(recipe), []
    for amax in amaxes:
        quantized, state = run(state, jnp.array([[amax, 0.1]], jnp.float32))
        scales.append(float(quantized.scales[0, 0]))
    return scales, state


def test_it_has_flaxs_names_and_shapes():
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=5))
    assert {name: array.shape for name, array in state.items()} == {
        f"{role}_{name}": shape
        for role in ("input", "kernel", "output_grad")
        for name, shape in (("scale", (1,)), ("amax_history", (5,)))
    }
    assert FP8.init_state(FP8.RowwiseScaling()) == {}


def scale_of(amax, margin=0):
    return float(np.float32(1) / (np.float32(448) / np.float32(amax) / 2**margin))


@pytest.mark.parametrize("margin", [0, 2])
def test_the_scale_comes_from_the_history_before_the_step(margin):
    recipe = FP8.DelayedScaling(amax_history_len=3, margin=margin)
    scales, state = run_steps(recipe, [2.0, 8.0, 4.0, 1.0, 1.0, 1.0])
    expected = [1.0, *(scale_of(a, margin) for a in (2.0, 8.0, 8.0, 8.0, 4.0))]
    assert scales == expected
    assert state["input_amax_history"].tolist() == [1.0, 1.0, 1.0]
    assert state["kernel_scale"] == 1.0


def test_a_history_of_one_step_and_the_most_recent_step_agree():
    amaxes = [2.0, 8.0, 4.0, 1.0]
    one, _ = run_steps(FP8.DelayedScaling(amax_history_len=1), amaxes)
    recent = FP8.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")
    assert one == run_steps(recent, amaxes)[0]
    assert one == [1.0, *map(scale_of, amaxes[:-1])]


def test_values_are_clipped_where_the_history_was_smaller():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    state = {**FP8.init_state(recipe), "input_amax_history": jnp.array([1.0, 0.0])}
    x = jnp.array([[100.0, 0.5]])
    quantized, _ = step(recipe)(state, x)
    scale = np.float32(1) / np.float32(448)
    np.testing.assert_array_equal(
        quantized.values, formulas.cast(x, scale, formulas.E4M3)
    )
    assert float(quantized.values[0, 0]) == 448


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan])
def test_an_amax_that_is_no_number_keeps_the_scale(amax):
    recipe = FP8.DelayedScaling(amax_history_len=1)
    run, state = step(recipe), FP8.init_state(recipe)
    _, state = run(state, jnp.array([[8.0, 1.0]]))
    quantized, state = run(state, jnp.full((1, 2), amax))
    assert float(quantized.scales[0, 0]) == scale_of(8.0)
    quantized, state = run(state, jnp.array([[8.0, 1.0]]))
    assert float(quantized.scales[0, 0]) == scale_of(8.0)


@pytest.mark.parametrize("length", [2, 4096])
@pytest.mark.parametrize("amax", [np.inf, np.nan])
def test_an_amax_of_any_history_that_is_no_number_keeps_the_scale(length, amax):
    # Flax's histories, which a checkpoint may contain, store NaNs.
    recipe = FP8.DelayedScaling(amax_history_len=length)
    history = jnp.full(length, 2.0).at[1].set(amax)
    state = {**FP8.init_state(recipe), "input_amax_history": history}
    quantized, _ = step(recipe)(state, jnp.ones((1, 2)))
    assert float(quantized.scales[0, 0]) == 1.0


def test_gradients_have_a_separate_state_and_format():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    scales, state = run_steps(recipe, [4.0, 4.0], role="output_grad")
    assert scales[1] == float(np.float32(1) / (np.float32(57344) / np.float32(4.0)))
    assert state["input_amax_history"].tolist() == [0.0, 0.0]


def test_functions_compute_amax_and_scale():
    recipe = FP8.DelayedScaling(
        amax_history_len=2,
        amax_compute_algo=jnp.sum,
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: 2 / amax,
    )
    scales, _ = run_steps(recipe, [2.0, 8.0, 1.0])
    assert scales == [1.0, 1.0, 5.0]


@pytest.mark.parametrize("name", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize(
    ("returned", "found"),
    [(np.ones(3, "f4"), r"an array of shape \(3,\)"), (None, "None"), ("one", "'one'")],
)
def test_functions_return_one_number(name, returned, found):
    recipe = FP8.DelayedScaling(**{name: lambda *_: returned})
    text = f"DelayedScaling: {name} returned {found} instead of one number. Return"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        run_steps(recipe, [1.0])


def test_a_skipped_or_unused_layer_keeps_its_state():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    state = {"a": FP8.init_state(recipe), "b": FP8.init_state(recipe)}
    state["b"]["input_amax_history"] = jnp.array([3.0, 2.0])

    def loss(state, used):
        def layer(state):
            x = jnp.array([[4.0, 2.0]])
            return jnp.sum(ub.quantize(x, recipe, state=state).dequantize())

        return jax.lax.cond(used, layer, lambda _: jnp.float32(0), state["a"])

    for used in (True, False):
        gradients = jax.jit(jax.grad(loss))(state, used)
        new = FP8.apply_updates(state, gradients)
        history = [4.0, 0.0] if used else [0.0, 0.0]
        assert new["a"]["input_amax_history"].tolist() == history
        jax.tree.map(np.testing.assert_array_equal, new["b"], state["b"])
    skipped = jax.tree.map(lambda leaf: jnp.full_like(leaf, -jnp.inf), state)
    kept = FP8.apply_updates(state, skipped)
    jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_states_are_stacked_by_a_scan_over_layers():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    state = FP8.init_state(recipe)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    xs = jnp.array([1.0, 2.0, 3.0])[:, None, None] * jnp.ones((3, 1, 2))

    def loss(states):
        def layer(total, args):
            x, state = args
            quantized = ub.quantize(x, recipe, state=state)
            return total + jnp.sum(quantized.dequantize(jnp.float32)), None

        return jax.lax.scan(jax.checkpoint(layer), 0.0, (xs, states))[0]

    new = FP8.apply_updates(states, jax.jit(jax.grad(loss))(states))
    assert new["input_amax_history"].tolist() == [[1, 0], [2, 0], [3, 0]]


def test_microbatches_carry_the_state():
    recipe = FP8.DelayedScaling(amax_history_len=4)
    run, state = step(recipe), FP8.init_state(recipe)
    xs = jnp.array([1.0, 4.0, 2.0, 3.0])[:, None, None] * jnp.ones((4, 1, 2))
    state, _ = jax.lax.scan(lambda s, x: (run(s, x)[1], None), state, xs)
    assert sorted(state["input_amax_history"].tolist()) == [1, 2, 3, 4]


def over_scan(loss, xs):
    return jax.lax.scan(lambda total, x: (total + loss(x), None), 0.0, xs)[0]


def over_map(loss, xs):
    return jnp.sum(jax.lax.map(loss, xs))


def over_fori_loop(loss, xs):
    return jax.lax.fori_loop(0, len(xs), lambda i, total: total + loss(xs[i]), 0.0)


def over_scan_of_jit(loss, xs):
    return over_scan(lambda x: jax.jit(loss)(x), xs)


LOOPS = [over_scan, over_map, over_fori_loop, over_scan_of_jit]
ORDERS = [lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]
XS = jnp.array([1.0, 4.0, 2.0, 3.0])[:, None, None] * jnp.ones((4, 1, 2))


def loss_of(loop, state, xs=XS):
    """Returns the sum of `xs`, quantized with one state in a loop over microbatches."""
    recipe = FP8.DelayedScaling(amax_history_len=2)

    def loss(x):
        return jnp.sum(ub.quantize(x, recipe, state=state).dequantize(jnp.float32))

    return loop(loss, xs)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("order", ORDERS, ids=["jit(grad)", "grad(jit)"])
def test_a_loop_that_closes_over_a_state_is_rejected(loop, order):
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=2))
    text = (
        "quantize: jax.lax.scan closes over this FP8 state, and jax would add .* Conv"
    )
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        order(lambda state: loss_of(loop, state))(state)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_may_close_over_a_state_that_is_not_differentiated(loop):
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=2))
    assert jax.jit(lambda state: loss_of(loop, state))(state) == 20.0
    frozen = lambda state: loss_of(loop, jax.lax.stop_gradient(state))  # noqa: E731
    new = jax.jit(jax.grad(frozen))(state)
    jax.tree.map(np.testing.assert_array_equal, FP8.apply_updates(state, new), state)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("order", ORDERS, ids=["jit(grad)", "grad(jit)"])
def test_microbatches_share_a_state_whose_sum_is_the_maximum(loop, order):
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=2))
    step = order(lambda state, xs: loss_of(loop, with_maximum_as_sum(state), xs))
    histories = ([4.0, 0.0], [8.0, 4.0], [2.0, 8.0])
    for factor, history in zip((1.0, 2.0, 0.5), histories, strict=True):
        new = FP8.apply_updates(state, step(state, factor * XS))
        assert new["input_amax_history"].tolist() == history
        largest = max(state["input_amax_history"].tolist())
        assert new["input_scale"] == (scale_of(largest) if largest else 1.0)
        assert new["kernel_scale"] == state["kernel_scale"]
        state = new


def in_wrapped_function(wrap):
    """Returns a loop that passes the state as an argument of a wrapped function."""
    return lambda loss, state: over_scan(lambda x: wrap(loss)(state, x), XS)


def in_inner_scan(loss):
    def run(state, x):
        states = jax.tree.map(lambda leaf: leaf[None], state)
        return over_scan(lambda state: loss(state, x), states)

    return run


def in_carry(loss, state):
    def body(carry, x):
        total, state = carry
        return (total + loss(state, x), state), None

    return jax.lax.scan(body, (0.0, state), XS)[0][0]


FACTORS = (0.0, 1.0, 2.0, 0.0, 0.5, jnp.inf, 0.25, 1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("length", "factors"),
    [
        (3, FACTORS),
        (5, FACTORS),
        # The first steps of mixed precision in f16, and a tensor that stays infinite.
        *((length, (jnp.inf,) * 4 + (1.0,)) for length in (1, 2, 5)),
        *((length, (1.0,) + (jnp.inf,) * 4) for length in (2, 3)),
    ],
)
@pytest.mark.parametrize(
    "loop",
    [
        in_wrapped_function(jax.jit),
        in_wrapped_function(jax.checkpoint),
        in_wrapped_function(in_inner_scan),
        in_carry,
    ],
    ids=["jit", "checkpoint", "inner scan", "carry"],
)
def test_apply_updates_restores_a_sum_of_states(loop, length, factors):
    recipe = FP8.DelayedScaling(amax_history_len=length)

    @jax.jit
    def update(state, factor):
        def loss(state, x):
            quantized = ub.quantize(factor * x, recipe, state=state)
            return jnp.sum(quantized.dequantize(jnp.float32))

        gradient = jax.grad(lambda state: loop(loss, state))(state)
        return FP8.apply_updates(state, gradient)

    one_call = step(recipe)
    state = expected = FP8.init_state(recipe)
    for factor in factors:
        state = update(state, factor)
        _, expected = one_call(expected, factor * jnp.sum(XS[:, :, :1], 0))
        jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_apply_updates_restores_a_sum_of_states_in_bf16():
    recipe = FP8.DelayedScaling(amax_history_len=4)
    history = jnp.array([1.7, 2.3, 0.9, 1.1])
    state = {**FP8.init_state(recipe), "input_amax_history": history}
    sums = {
        "input_scale": jnp.array([3 * scale_of(2.3)]),
        "input_amax_history": 3 * jnp.roll(history, -1),
    }
    new = {**jax.tree.map(jnp.zeros_like, state), **sums}
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new)
    found = FP8.apply_updates(state, rounded)
    assert (
        found["input_amax_history"][1:].tolist()
        == history[jnp.array([2, 3, 0])].tolist()
    )
    np.testing.assert_allclose(found["input_scale"], [scale_of(2.3)], rtol=2**-8)
    assert found["input_scale"].dtype == found["input_amax_history"].dtype == "float32"


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_apply_updates_keeps_the_state_of_one_call(length, algo):
    """Amaxes are multiples of each other, so that scales grow by whole numbers."""
    recipe = FP8.DelayedScaling(amax_history_len=length, amax_compute_algo=algo)
    amaxes = jnp.array([0, 1, 2, 4, 896, jnp.inf])
    steps = jax.random.choice(jax.random.key(length), amaxes, (24, 100))

    def run(state, amax):
        def loss(state):
            quantized = ub.quantize(amax[None], recipe, state=state)
            return jnp.sum(quantized.dequantize(jnp.float32))

        new = jax.grad(loss)(state)
        return new, (FP8.apply_updates(state, new), new)

    state = FP8.init_state(recipe)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 100), state)
    scan = jax.jit(lambda *args: jax.lax.scan(jax.vmap(run), *args)[1])
    found, wanted = scan(states, steps)
    for name in ("input_scale", "input_amax_history"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_a_state_that_some_microbatches_skip_has_the_maximum_of_the_others():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    state = FP8.init_state(recipe)

    def loss(state, limit):
        state = with_maximum_as_sum(state)

        def of_one(x):
            return jax.lax.cond(
                jnp.max(x) < limit,
                lambda: jnp.sum(ub.quantize(x, recipe, state=state).dequantize()),
                lambda: jnp.float32(0),
            )

        return over_scan(of_one, XS)

    for limit, history in ((3.5, [3.0, 0.0]), (0.5, [0.0, 0.0])):
        new = FP8.apply_updates(state, jax.jit(jax.grad(loss))(state, limit))
        assert new["input_amax_history"].tolist() == history
        assert new["input_scale"] == 1.0


def test_one_entry_of_a_state_belongs_to_one_tensor():
    recipe = FP8.DelayedScaling(amax_history_len=2)

    def loss(state, convert, roles):
        state = convert(state)
        return sum(
            jnp.sum(ub.quantize(x, recipe, role=role, state=state).dequantize())
            for x, role in zip(XS[1:3], roles, strict=True)
        )

    state, same = FP8.init_state(recipe), ("input", "input")
    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    new = gradient(state, lambda state: state, ("input", "kernel"))
    assert new["input_amax_history"].tolist() == [4.0, 0.0]
    assert new["kernel_amax_history"].tolist() == [2.0, 0.0]
    new = gradient(state, with_maximum_as_sum, same)
    assert new["input_amax_history"].tolist() == [4.0, 0.0]
    text = "quantize: this FP8 state went into another call already"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        gradient(state, lambda state: state, same)


def test_vmap_must_map_the_state_of_a_quantized_array():
    recipe = FP8.DelayedScaling(amax_history_len=2)
    run, state = step(recipe), FP8.init_state(recipe)
    xs = jnp.array([1.0, 4.0])[:, None, None] * jnp.ones((2, 1, 2))
    error = ub.errors.UnsupportedOverlapError
    with pytest.raises(error, match="quantize: jax.vmap maps x but not its FP8 state"):
        jax.vmap(run, (None, 0))(state, xs)
    states = jax.tree.map(lambda array: jnp.stack([array, array]), state)
    _, new = jax.vmap(run)(states, xs)
    assert new["input_amax_history"].tolist() == [[1, 0], [4, 0]]


def test_wrong_trees_are_rejected():
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=2))
    error = ub.errors.ShapeContractError
    with pytest.raises(error, match="state and gradients are different trees"):
        FP8.apply_updates(state, [])
    other = FP8.init_state(FP8.DelayedScaling(amax_history_len=3))
    text = r"\['input_amax_history'\] has shape \(2,\) in state, but \(3,\) in gradient"
    with pytest.raises(error, match=text):
        FP8.apply_updates(state, other)
    params = {"w": jnp.ones(2), "layer": state}
    text = r"state\['w'\] is neither a scale .*without parameters and main_grads"
    with pytest.raises(error, match=text):
        FP8.apply_updates(params, params)
    with pytest.raises(ub.errors.ConfigurationError, match="init_state: recipe = 1 is"):
        FP8.init_state(1)


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("scale", np.ones((), "f4"), "and its scale .*, but one axis of a scale"),
        ("scale", np.ones((3, 1), "f4"), "stack all arrays of a state along one axis"),
        (
            "scale",
            np.ones((2, 2), "f4"),
            r"and its scale \(2, 2\), but one axis of",
        ),
        ("scale", 1.0, "is of type float, but the op takes an array"),
        (
            "amax_history",
            np.ones((), "f4"),
            r"has shape \(\), and its scale \(2, 1",
        ),
        ("amax_history", np.ones(3, "f4"), r"has shape \(3,\), and its scale \(2"),
        (
            "amax_history",
            np.ones((2, 0), "f4"),
            r"has shape \(2, 0\), and its scale",
        ),
        ("amax_history", np.ones((2, 3), "i4"), "is int32, but the op takes float32"),
    ],
)
def test_arrays_of_other_shapes_and_dtypes_are_no_state(name, array, text):
    arrays = {"scale": jnp.ones((2, 1)), "amax_history": jnp.ones((2, 3)), name: array}
    tensor = {f"input_{key}": array for key, array in arrays.items()}
    with pytest.raises(ub.errors.ShapeContractError, match=rf"state\['input_.*{text}"):
        FP8.apply_updates(tensor, tensor)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_states_may_be_stacked_along_any_axis(axis, length, num_layers):
    recipe = FP8.DelayedScaling(amax_history_len=length)
    states = [FP8.init_state(recipe)] * num_layers
    new_states = [step(recipe)(states[0], XS[0] + i)[1] for i in range(num_layers)]

    def stacked(states):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *states)

    found = FP8.apply_updates(stacked(states), stacked(new_states))
    jax.tree.map(np.testing.assert_array_equal, found, stacked(new_states))
    # Three microbatches share the next states.
    sums = jax.tree.map(lambda leaf: 3 * leaf, new_states)
    found = FP8.apply_updates(stacked(states), stacked(sums))
    wanted = [FP8.apply_updates(*pair) for pair in zip(states, sums, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, found, stacked(wanted))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_states_of_layers_may_be_sharded(wrap, axis_type):
    state = FP8.init_state(FP8.DelayedScaling(amax_history_len=4))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    sums = jax.tree.map(lambda leaf: 3 * leaf, states)
    with jax.set_mesh(jax.make_mesh((2,), ("pp",), (axis_type,))):
        sharded = jax.device_put((states, sums), P("pp"))
        found = wrap(FP8.apply_updates)(*sharded)
    for name, array in found.items():
        np.testing.assert_array_equal(array, states[name])
        if axis_type == AxisType.Explicit:
            assert array.sharding.spec == P("pp", None)
