"""`fp8=` of `ub.dot_general`, `ub.overlap` and linen's `Overlap`."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import (
    assert_trees_close,
    random_layer,
    random_model,
    random_variables,
)
from operands import assert_equal, normal
from programs import calls, compiled_text, tp_mesh
from scaled_operands import DEFAULT_RECIPES as RECIPES
from scaled_operands import DELAYED, PASSED_ON

import jax_ub as ub
from jax_ub.errors import ConfigurationError, ShapeContractError, UnknownNameError
from jax_ub.flax import Linear, OverwriteWithGradient, TransformerLayer
from jax_ub.flax.linen import Overlap

FP8 = ub.fp8
KINDS = {"up": "column", "down": "row", "head.attend": "column"}
DENSE = (((2,), (0,)), ((), ()))
COLLECTION = "_overwrite_with_gradient"
X = normal(0, (2, 8, 64))


class Net(nnx.Module):
    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Einsum("BTN,ND->BTD", (128, 64), None, rngs=rngs)
        self.head = nnx.Embed(64, 64, rngs=rngs)

    def __call__(self, x):
        return self.head.attend(self.down(jnp.sin(self.up(x))))


class LinenNet(nn.Module):
    def setup(self):
        self.up = nn.Dense(128)
        self.down = nn.Einsum((128, 64), "BTN,ND->BTD")
        self.head = nn.Embed(64, 64)

    def __call__(self, x):
        return self.head.attend(self.down(jnp.sin(self.up(x))))


def states_of(model):
    return nnx.state(model, OverwriteWithGradient)


def gradients(model, x=X):
    """Returns the gradients of an nnx model's parameters and its new FP8 states."""
    graph, params, states = nnx.split(model, nnx.Param, OverwriteWithGradient)

    @jax.jit
    def run(params, states, x):
        def loss(params, states):
            return jnp.sum(jnp.sin(nnx.merge(graph, params, states)(x)))

        return jax.grad(loss, (0, 1))(params, states)

    found, new = run(params, states, x)
    text = compiled_text(run, params, states, x)
    return found, FP8.apply_updates(states, new), text


def relative_error(found, wanted):
    found, wanted = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (found, wanted)
    )
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@covering(recipe=PASSED_ON, kind=["column", "row"])
def test_dot_general_equals_the_layer_of_jax_ub(recipe, kind):
    recipe = RECIPES[recipe]
    state = FP8.init_state(recipe) or None
    dot = ub.dot_general(kind, fp8=recipe)
    with jax.set_mesh(tp_mesh(2)):
        options = {"parallel": kind, "use_bias": False, "fp8": recipe}
        layer = random_layer(Linear, 64, 128, **options)

        def loss(w, state, x):
            return jnp.sum(jnp.sin(dot(x, w, DENSE, fp8_state=state)))

        w = layer.kernel[...]
        dw, new = jax.jit(jax.grad(loss, (0, 1)))(w, state, X)
        wanted, wanted_states, _ = gradients(layer)
    assert_equal(dw, wanted["kernel"][...])
    if state is not None:
        assert_trees_close(
            FP8.apply_updates(state, new),
            nnx.to_pure_dict(wanted_states)["fp8_state"],
            rtol=0,
            atol=0,
        )


@pytest.mark.parametrize("recipe", ["delayed", *nightly("block", "current", "row")])
def test_an_overlapped_nnx_model_is_fp8(recipe):
    with jax.set_mesh(tp_mesh(2)):
        wanted, *_ = gradients(ub.overlap(random_model(Net), KINDS))
        model = ub.overlap(random_model(Net), KINDS, fp8=RECIPES[recipe])
        assert ub.overlapped(model) == KINDS
        found, states, text = gradients(model)
    assert 1e-3 < relative_error(found, wanted) < 0.2
    assert "f8e4m3fn[" in text
    histories = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(states)
        if "amax_history" in jax.tree_util.keystr(path)
    ]
    assert len(histories) == (9 if recipe == "delayed" else 0)
    assert all(history[0] > 0 for history in histories)


def test_recipes_by_path_leave_other_layers_in_their_dtype():
    recipes = {"up": None, "head.*": DELAYED, ".*": RECIPES["current"]}
    with jax.set_mesh(tp_mesh(2)):
        model = ub.overlap(random_model(Net), KINDS, fp8=recipes)
        layouts = {
            "up": model.up.dot_general.sharding_layout,
            "down": model.down.einsum_op.dense.sharding_layout,
            "head": model.head.attend_dot_general.product.sharding_layout,
        }
        assert {name: each.fp8 for name, each in layouts.items()} == {
            "up": None,
            "down": RECIPES["current"],
            "head": DELAYED,
        }
        *_, text = gradients(model)
        # A second call replaces the recipes and removes the states.
        ub.overlap(model, KINDS)
        assert not jax.tree.leaves(states_of(model))
        *_, plain = gradients(model)
    assert calls(text).total() == 8
    assert "f8e4m3fn[" in text
    assert "f8e4m3fn[" not in plain


def test_stacked_layers_have_stacked_states():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(64, 64, rngs=rngs)

    with jax.set_mesh(tp_mesh(2)):
        model = random_model(lambda: make(nnx.Rngs(0)))
        ub.overlap(model, {"": "column"}, fp8=DELAYED)
        graph, params, states = nnx.split(model, nnx.Param, OverwriteWithGradient)

        def loss(states):
            def layer(x, layer):
                return jnp.sin(nnx.merge(graph, *layer)(x)), None

            y, _ = jax.lax.scan(jax.checkpoint(layer), X, (params, states))
            return jnp.sum(y)

        new = FP8.apply_updates(states, jax.jit(jax.grad(loss))(states))
    (history,) = (
        leaf
        for path, leaf in jax.tree.leaves_with_path(new)
        if "input_amax_history" in jax.tree_util.keystr(path)
    )
    assert history.shape == (3, 2)
    assert history[0, 0] == jnp.max(jnp.abs(X))
    assert np.all(history[1:, 0] <= 1)
    assert np.all(history[:, 0] > 0)


@pytest.mark.parametrize("recipe", ["delayed", *nightly("row", "current", "block")])
def test_an_overlapped_linen_model_is_fp8(recipe):
    net = LinenNet()

    def grads(overlap):
        with jax.set_mesh(tp_mesh(2)), overlap:
            variables = random_variables(net, X)

            def loss(variables):
                return jnp.sum(jnp.sin(net.apply(variables, X)))

            return variables, jax.jit(jax.grad(loss))(variables)

    _, wanted = grads(Overlap(KINDS))
    variables, found = grads(Overlap(KINDS, fp8=RECIPES[recipe]))
    assert 1e-3 < relative_error(found["params"], wanted["params"]) < 0.2
    assert (COLLECTION in variables) == (recipe == "delayed")
    if recipe == "delayed":
        new = FP8.apply_updates(variables[COLLECTION], found[COLLECTION])
        assert set(new) == {"up", "down", "head"}
        for state in new.values():
            assert all(state[f"{role}_amax_history"][0] > 0 for role in ("input",))
            assert set(state) == set(FP8.init_state(DELAYED))


class Stack(nn.Module):
    axes: tuple[str, ...] = ("params", COLLECTION)

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return jnp.sin(nn.Dense(64, name="up")(x)), None

        scan = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes=dict.fromkeys(self.axes, 0),
            split_rngs={"params": True},
            length=3,
        )
        return scan(name="layers")(x, None)[0]


def test_a_linen_scan_over_layers_stacks_states():
    with jax.set_mesh(tp_mesh(2)), Overlap({".*up": "column"}, fp8=DELAYED):
        variables = Stack().init(jax.random.key(0), X)

        def loss(state):
            y = Stack().apply({**variables, COLLECTION: state}, X)
            return jnp.sum(y)

        state = variables[COLLECTION]
        new = FP8.apply_updates(state, jax.jit(jax.grad(loss))(state))
        history = new["layers"]["up"]["input_amax_history"]
        assert history.shape == (3, 2)
        assert history[0, 0] == jnp.max(jnp.abs(X))
        with pytest.raises(ConfigurationError, match="in nn.scan, add the collection"):
            Stack(("params",)).init(jax.random.key(0), X)


def test_a_state_that_was_not_initialized_is_an_error():
    net = LinenNet()
    variables = random_variables(net, X)
    text = "no input_scale in the collection .*Initialize the model with this recipe"
    with (
        pytest.raises(ConfigurationError, match=text),
        jax.set_mesh(tp_mesh(2)),
        Overlap(KINDS, fp8=DELAYED),
    ):
        net.apply(variables, X)


def test_models_and_layers_with_states_can_be_pickled():
    with jax.set_mesh(tp_mesh(2)):
        overlapped = ub.overlap(random_model(Net), KINDS, fp8=DELAYED)
        for model in (overlapped, Linear(64, 64, rngs=nnx.Rngs(0), fp8=DELAYED)):
            copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
            assert all(nnx.state(each, OverwriteWithGradient) for each in copies)
            for each in copies:
                assert_equal(each(X), model(X))


def test_a_layer_that_is_called_twice_with_one_state_is_rejected():
    with jax.set_mesh(tp_mesh(2)):
        up = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        model = ub.overlap(up, {"": "column"}, fp8=DELAYED)
        graph, params, states = nnx.split(model, nnx.Param, OverwriteWithGradient)

        def loss(states):
            layer = nnx.merge(graph, params, states)
            return jnp.sum(layer(layer(X)))

        with pytest.raises(ShapeContractError, match="FP8 state went into another"):
            jax.grad(loss)(states)


def test_fallbacks_are_not_fp8_and_are_recorded():
    dot = ub.dot_general("column", fp8=RECIPES["current"])
    x, w = normal(0, (1, 3, 64)), normal(1, (64, 32))
    ub.fallbacks(clear=True)
    with jax.set_mesh(tp_mesh(2)):
        assert_equal(dot(x, w, DENSE), jax.lax.dot_general(x, w, DENSE))
    assert "3 tokens" in ub.fallbacks()[-1].reason


def test_wrong_recipes():
    text = "fp8 = 'hybrid' is not a recipe"
    with pytest.raises(ConfigurationError, match=f"dot_general: {text}"):
        ub.dot_general("column", fp8="hybrid")
    with pytest.raises(ConfigurationError, match=f"linear: {text}"):
        ub.linear(X[0], X[0].T, fp8="hybrid")
    with pytest.raises(ConfigurationError, match=f"TransformerLayer: {text}"):
        TransformerLayer(64, 64, 4, rngs=nnx.Rngs(0), fp8="hybrid")
    with jax.set_mesh(tp_mesh(2)):
        for fp8 in ("hybrid", {".*": "hybrid"}):
            with pytest.raises(ConfigurationError, match=f"overlap: {text}"):
                ub.overlap(random_model(Net), KINDS, fp8=fp8)
            with pytest.raises(ConfigurationError, match=f"overlap: {text}"):
                Overlap(KINDS, fp8=fp8)
        unknown = "'upp' of fp8 matches no overlapped layer"
        with pytest.raises(UnknownNameError, match=unknown):
            ub.overlap(random_model(Net), KINDS, fp8={"upp": DELAYED})
        dot = ub.dot_general("column", fp8=DELAYED)
        with pytest.raises(ConfigurationError, match="DelayedScaling needs a state"):
            dot(X, normal(1, (64, 32)), DENSE)


def test_a_state_that_no_gradient_reaches_is_a_warning():
    def loss(model, x):
        return jnp.sum(jnp.sin(model(x)))

    both = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    with jax.set_mesh(tp_mesh(2)):
        model = ub.overlap(random_model(Net), KINDS, fp8=DELAYED)
        nnx.eval_shape(nnx.grad(loss, argnums=both), model, X)
        jax.eval_shape(lambda x: jax.grad(loss, 1)(model, x), X)  # nothing is trained
        text = r"layer '.*'\): JAX takes the gradient of the kernel, but not of the FP"
        with pytest.warns(UserWarning, match=text):
            nnx.eval_shape(nnx.grad(loss), model, X)
        nnx.eval_shape(nnx.grad(loss), model, X)  # once
