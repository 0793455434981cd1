"""`apply_updates`: sums of states, and states that are stacked, sharded or wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from fp8_steps import XS, over_scan, scale_of, step
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ub as ub

FP8 = ub.fp8


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


@covering(
    steps=[
        (3, FACTORS),
        (5, FACTORS),
        # The first steps of mixed precision in f16, and a tensor that stays infinite.
        *((length, (jnp.inf,) * 4 + (1.0,)) for length in (1, 2, 5)),
        *((length, (1.0,) + (jnp.inf,) * 4) for length in (2, 3)),
    ],
    loop=[
        in_wrapped_function(jax.jit),
        in_wrapped_function(jax.checkpoint),
        in_wrapped_function(in_inner_scan),
        in_carry,
    ],
)
def test_apply_updates_restores_a_sum_of_states(steps, loop):
    length, factors = steps
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


@covering(axis=[0, 1], length=[1, 2, 3, 4], num_layers=[1, 3])
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
