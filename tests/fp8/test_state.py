"""State of delayed scaling: its update is the gradient of the state."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_steps import XS, over_scan, scale_of, step
from scaled_operands import with_maximum_as_sum

import jax_ub as ub

FP8 = ub.fp8


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


def test_gradients_have_a_state_and_a_format_of_their_own():
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


def over_map(loss, xs):
    return jnp.sum(jax.lax.map(loss, xs))


def over_fori_loop(loss, xs):
    return jax.lax.fori_loop(0, len(xs), lambda i, total: total + loss(xs[i]), 0.0)


def over_scan_of_jit(loss, xs):
    return over_scan(lambda x: jax.jit(loss)(x), xs)


LOOPS = [over_scan, over_map, over_fori_loop, over_scan_of_jit]
ORDERS = [lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]


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
