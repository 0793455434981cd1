"""State of delayed scaling in training steps: scan, cond, optax, TrainState, orbax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from covering import nightly
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from flax_models import assert_trees_close, random_model, random_variables
from operands import assert_equal, normal
from programs import calls, compiled_text, loop_text, tp_mesh
from scaled_operands import DEFAULT_RECIPES, with_maximum_as_sum

import jax_ub as ub
from jax_ub.flax import Linear, MainGrad, OverwriteWithGradient, linen

FP8 = ub.fp8
RECIPE = FP8.DelayedScaling(amax_history_len=4)
COLLECTION = "_overwrite_with_gradient"
X, DY = normal(0, (2, 8, 64)), normal(1, (2, 8, 64))


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(tp_mesh(2)):
        yield


class Net(nnx.Module):
    """A column and a row layer; the second one may be skipped or left out."""

    def __init__(self, rngs=None, **options):
        rngs, options = rngs or nnx.Rngs(0), {"use_bias": False, **options}
        self.up = Linear(64, 128, parallel="column", rngs=rngs, **options)
        self.down = Linear(128, 64, parallel="row", rngs=rngs, **options)

    def __call__(self, x):
        return self.down(jnp.sin(self.up(x)))


def net(**options):
    model = random_model(lambda: Net(fp8=RECIPE, **options))
    return nnx.split(model, nnx.Param, OverwriteWithGradient, MainGrad)


def loss_of(graph, *state):
    return lambda x: jnp.sum(jnp.sin(nnx.merge(graph, *state)(x)))


def history(states, layer, role="input"):
    return np.asarray(states[layer]["fp8_state"][f"{role}_amax_history"][...])


def amax(x):
    return float(jnp.max(jnp.abs(x)))


def assert_maximum(state, states):
    """Checks that a state is the maximum of the states of separate calls."""
    wanted = jax.tree.map(lambda *arrays: np.max(arrays, axis=0), *states)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), state, wanted
    )


@pytest.mark.parametrize("skipped", ["by cond", "unused", "no"])
def test_a_layer_that_does_not_run_keeps_its_state(skipped):
    graph, params, states, _ = net()

    def loss(states, is_used):
        model = nnx.merge(graph, params, states)
        y = model.up(X)
        if skipped == "unused":
            return jnp.sum(jnp.sin(y))
        return jnp.sum(
            jax.lax.cond(is_used, lambda y: model.down(y), lambda y: y[..., :64], y)
        )

    gradients = jax.jit(jax.grad(loss))(states, skipped == "no")
    new = FP8.apply_updates(states, gradients)
    assert history(new, "up")[0] == amax(X)
    assert (history(new, "down")[0] > 0) == (skipped == "no")
    if skipped != "no":
        jax.tree.map(assert_equal, new["down"], states["down"])


@pytest.mark.parametrize("wrap", [jax.checkpoint, *nightly(lambda f: f)])
def test_a_scan_over_layers_updates_each_state(wrap):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Net(rngs, fp8=RECIPE)

    graph, params, states = nnx.split(
        make(nnx.Rngs(0)), nnx.Param, OverwriteWithGradient
    )

    def loss(states, x=X):
        def layer(x, state):
            return jnp.sin(nnx.merge(graph, *state)(x)), None

        return jnp.sum(jax.lax.scan(wrap(layer), x, (params, states))[0])

    def of_layers(states):
        x = X
        for i in range(3):
            pick = jax.tree.map(lambda leaf, i=i: leaf[i], (params, states))
            x = jnp.sin(nnx.merge(graph, *pick)(x))
        return jnp.sum(x)

    found, wanted = (jax.jit(jax.grad(each))(states) for each in (loss, of_layers))
    for name in ("up", "down"):
        found_history = history(found, name)
        assert found_history.shape == (3, 4)
        assert np.all(found_history[:, 0] > 0)
        np.testing.assert_allclose(found_history, history(wanted, name), rtol=1e-6)

    def loss_of_microbatches(states, xs):
        states = with_maximum_as_sum(states)
        return jnp.sum(jax.lax.map(lambda x: loss(states, x), xs))

    xs = jnp.stack([X, 8 * X, 2 * X])
    shared = jax.jit(jax.grad(loss_of_microbatches))(states, xs)
    assert_maximum(shared, [jax.jit(jax.grad(loss))(states, x) for x in xs])


@pytest.mark.parametrize("is_used", [True, False])
def test_nnx_transforms_update_each_state(is_used):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Net(rngs, fp8=RECIPE)

    def layer(x, model):
        run = nnx.remat(lambda model, x: model(x))
        return nnx.cond(is_used, run, lambda model, x: x, model, x)

    def loss(model):
        y = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, model)
        return jnp.sum(y * DY)

    @nnx.jit
    def step(model):
        states = nnx.DiffState(0, OverwriteWithGradient)
        new = nnx.grad(loss, argnums=states)(model)
        return FP8.apply_updates(nnx.state(model, OverwriteWithGradient), new)

    model = make(nnx.Rngs(0))
    states = (step(model)[name]["fp8_state"] for name in ("up", "down"))
    check_layers_of_a_scan(*states, model.up.kernel[...], is_used)


def check_layers_of_a_scan(up, down, kernels, is_used):
    """Checks the states of two layers after a step, which may have skipped them."""
    found = [
        up["input_amax_history"][0],
        up["kernel_amax_history"][:, 0],
        down["output_grad_amax_history"][1, 0],
    ]
    of_kernels = np.abs(kernels).max((1, 2))
    wanted = [np.float32([amax(X), 0, 0, 0]), of_kernels, amax(DY)]
    for history, each in zip(found, wanted, strict=True):
        np.testing.assert_allclose(history[...], each * is_used, rtol=1e-6)
    assert_equal(down["kernel_scale"][...], np.ones((2, 1), "float32"))


def test_microbatches_carry_states_and_main_grads():
    graph, params, states, main_grads = net(main_grad=True)
    factors = jnp.asarray([1.0, 8.0, 2.0, 4.0])
    xs = factors[:, None, None, None] * X

    def step(carry, x):
        def loss(states, main_grads):
            return loss_of(graph, params, states, main_grads)(x)

        states, main_grads = carry
        new, main_grads = jax.grad(loss, (0, 1))(states, main_grads)
        return (FP8.apply_updates(states, new), main_grads), None

    run = jax.jit(lambda *carry: jax.lax.scan(step, carry, xs)[0])
    new, summed = run(states, main_grads)
    # The history is a ring, whose index 0 is the latest step.
    assert_equal(history(new, "up"), amax(X) * factors[jnp.asarray([3, 0, 1, 2])])
    assert all(np.all(history(new, "down", role) > 0) for role in ("input", "kernel"))
    carry = states, main_grads
    for x in xs:
        carry = jax.jit(lambda carry, x: step(carry, x)[0])(carry, x)
    jax.tree.map(assert_equal, carry, (new, summed))


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_microbatches_share_a_state_whose_sum_is_the_maximum(library):
    xs = jnp.asarray([1.0, 8.0, 2.0])[:, None, None, None] * X
    if library == "nnx":
        graph, params, states, _ = net()

        def apply(states, x):
            return loss_of(graph, params, states)(x)
    else:
        layer = linen.Linear(128, parallel="column", fp8=RECIPE)
        variables = random_variables(layer, X)
        states = variables[COLLECTION]

        def apply(states, x):
            return jnp.sum(jnp.sin(layer.apply({**variables, COLLECTION: states}, x)))

    def loss(states, convert=lambda states: states):
        states = convert(states)
        return jnp.sum(jax.lax.map(lambda x: apply(states, x), xs))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found = gradient(states, with_maximum_as_sum)
    assert_maximum(found, [jax.grad(apply)(states, x) for x in xs])
    text = r"linear\(parallel='column'\): jax.lax.scan closes over this FP8 state"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        gradient(states)


@pytest.mark.parametrize(
    ("recipe", "is_moved"), [("row", True), ("block", True), ("current", False)]
)
@pytest.mark.parametrize("wraps", [False, True])
def test_xla_moves_quantization_of_kernels_out_of_loops(recipe, is_moved, wraps):
    graph, params = nnx.split(random_model(lambda: Net(fp8=DEFAULT_RECIPES[recipe])))

    def step(params, xs):
        def loss(x):
            return loss_of(graph, params)(x)

        if wraps:
            loss = jax.checkpoint(loss, prevent_cse=False)
        return jnp.sum(jax.lax.map(loss, xs))

    text = compiled_text(jax.jit(jax.grad(step)), params, jnp.stack([X, 2 * X]))
    in_loops = loop_text(text)
    of_kernels, of_x = (
        re.findall(rf"f8e4m3fn\[{shape}\]\S* custom-call.*jax_ub.cast", in_loops)
        for shape in ("64,64", "(?:1,)?2,4,64")
    )
    assert of_x
    assert (not of_kernels) == is_moved


@pytest.mark.parametrize("recipe", ["block", *nightly("row", "current")])
def test_stacked_kernels_are_quantized_in_front_of_the_loops(recipe):
    recipe = DEFAULT_RECIPES[recipe]

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Net(rngs, fp8=recipe)

    graph, params = nnx.split(make(nnx.Rngs(0)))

    def loss(params, quantize):
        def layer(x, params):
            return jnp.sin(nnx.merge(graph, params)(x)), None

        given = quantize(params)
        layers = jax.lax.map(
            lambda x: jax.lax.scan(layer, x, given)[0], jnp.stack([X, 2 * X])
        )
        return jnp.sum(layers * DY)

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found, wanted = (
        step(params, quantize)
        for quantize in (
            jax.vmap(lambda params: FP8.quantize_params(params, recipe)),
            lambda params: params,
        )
    )
    assert_trees_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_clipping_and_weight_decay_leave_the_state_alone():
    graph, params, states, _ = net()
    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2))

    @jax.jit
    def step(params, states, optimizer_state):
        def loss(params, states):
            return loss_of(graph, params, states)(X)

        gradients, new = jax.grad(loss, (0, 1))(params, states)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        return params, FP8.apply_updates(states, new), optimizer_state

    optimizer_state, scales, before = optimizer.init(params), [], params
    for _ in range(2):
        scales.append(amax(params["up"]["kernel"][...]))
        params, states, optimizer_state = step(params, states, optimizer_state)
    # The second step quantizes the updated kernel, by the history of the first.
    assert history(states, "up", "kernel")[0] == scales[1] != scales[0]
    state = states["up"]["fp8_state"]
    np.testing.assert_allclose(state["kernel_scale"][...], scales[0] / 448, rtol=1e-6)
    assert history(states, "up")[0] == amax(X)
    assert not np.array_equal(before["up"]["kernel"][...], params["up"]["kernel"][...])


def test_a_frozen_kernel_has_a_state_and_no_wgrad():
    graph, params, states, _ = net()

    @jax.jit
    def step(states, x):
        return jax.grad(
            lambda states, x: loss_of(graph, params, states)(x), argnums=(0, 1)
        )(states, x)

    new, dx = step(states, X)
    assert np.any(dx)
    assert all(history(new, "down", role)[0] > 0 for role in ("kernel", "output_grad"))
    found = calls(compiled_text(step, states, X))
    assert found["all_gather_matmul"] == found["matmul_reduce_scatter"] == 2
    assert "wgrad" not in found


class LinenNet(nn.Module):
    fp8: object = RECIPE

    def setup(self):
        options = {"fp8": self.fp8, "use_bias": False}
        self.up = linen.Linear(128, parallel="column", **options)
        self.down = linen.Linear(64, parallel="row", **options)

    def __call__(self, x):
        return self.down(jnp.sin(self.up(x)))


class MaybeNet(nn.Module):
    @nn.compact
    def __call__(self, x, is_used):
        net = LinenNet(name="net")
        if self.is_initializing():
            return net(x), None
        return nn.cond(is_used, lambda net, x: net(x), lambda net, x: x, net, x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x, is_used=True):
        layers = nn.scan(
            nn.remat(MaybeNet, prevent_cse=False),
            variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=2,
        )
        return layers(name="layers")(x, is_used)[0]


@pytest.mark.parametrize("is_used", [True, False])
def test_linen_transforms_update_each_state(is_used):
    variables = random_variables(Stack(), X)

    @jax.jit
    def step(states):
        def loss(states):
            y = Stack().apply({**variables, COLLECTION: states}, X, is_used)
            return jnp.sum(y * DY)

        return FP8.apply_updates(states, jax.grad(loss)(states))

    states = step(variables[COLLECTION])["layers"]["net"]
    kernels = variables["params"]["layers"]["net"]["up"]["kernel"]
    check_layers_of_a_scan(states["up"], states["down"], kernels, is_used)


def linen_loss(variables):
    return jnp.sum(jnp.sin(LinenNet().apply(variables, X)))


def test_flaxs_train_state_takes_over_the_state():
    variables = random_variables(LinenNet(), X)
    state = TrainState.create(
        apply_fn=LinenNet().apply, params=variables, tx=optax.adamw(1e-2)
    )
    gradients = jax.jit(jax.grad(linen_loss))(variables)
    new = state.apply_gradients(grads=gradients).params
    wanted = FP8.apply_updates(variables[COLLECTION], gradients[COLLECTION])
    jax.tree.map(assert_equal, new[COLLECTION], wanted)
    kernels = (each["params"]["up"]["kernel"] for each in (new, variables))
    assert not np.array_equal(*kernels)
    assert new[COLLECTION]["up"]["input_amax_history"][0] == amax(X)


def test_a_step_as_maxtexts_finds_the_state_by_the_name_of_its_type():
    model = random_model(lambda: Net(fp8=RECIPE))

    def is_state(_, value):
        return getattr(value, "type", type(value)).__name__ == COLLECTION

    graph, states, rest = nnx.split(model, is_state, ...)

    def loss(states, rest):
        return loss_of(graph, states, rest)(X)

    new = jax.jit(jax.grad(loss))(states, rest)
    nnx.update(model, new)
    assert_equal(model.up.fp8_state.input_amax_history[...][0], jnp.max(jnp.abs(X)))


def saved_and_restored(path, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", like)


def test_orbax_restores_the_state(tmp_path):
    graph, params, states, _ = net()

    @jax.jit
    def step(params, states):
        new = jax.grad(lambda states: loss_of(graph, params, states)(X))(states)
        return FP8.apply_updates(states, new)

    states = step(params, states)
    found = saved_and_restored(tmp_path, (params, states), net()[1:3])
    jax.tree.map(assert_equal, found, (params, states))
    jax.tree.map(assert_equal, step(*found), step(params, states))


def test_orbax_restores_a_linen_train_state(tmp_path):
    state = TrainState.create(
        apply_fn=LinenNet().apply,
        params=random_variables(LinenNet(), X),
        tx=optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2)),
    )

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(linen_loss)(state.params))

    state = step(state)
    assert state.params[COLLECTION]["up"]["input_amax_history"][0] == amax(X)
    found = saved_and_restored(tmp_path, state, jax.eval_shape(step, state))
    jax.tree.map(assert_equal, found, state)
    jax.tree.map(assert_equal, step(found), step(state))


def test_checkpoints_move_between_fp8_and_other_models(tmp_path):
    graph, params, states, _ = net()
    plain, plain_params = nnx.split(random_model(Net))
    into_fp8 = saved_and_restored(tmp_path / "plain", plain_params, params)
    assert np.isfinite(loss_of(graph, into_fp8, states)(X))
    back = saved_and_restored(tmp_path / "fp8", params, plain_params)
    assert_equal(loss_of(plain, back)(X), loss_of(plain, plain_params)(X))


def test_layers_of_one_name_may_be_fp8_or_not():
    modes = [ub.UserBufferQuantizationMode.NONE, ub.UserBufferQuantizationMode.FP8]
    names = {"fc1_fprop": {"method": "ring_exchange"}}
    ub.initialize_ub(
        (64, 64), 2, quantization_modes=modes, ub_cfgs=names, mesh=tp_mesh(2)
    )
    options = {"parallel": "column", "ub_name": "fc1", "use_bias": False}
    first = Linear(64, 64, rngs=nnx.Rngs(0), **options)
    second = Linear(64, 64, rngs=nnx.Rngs(1), fp8=FP8.Float8CurrentScaling(), **options)
    run = jax.jit(lambda x: second(jnp.sin(first(x))))
    text = compiled_text(run, X)
    target = 'custom_call_target="jax_ub$all_gather_matmul"'
    lines = [line for line in text.splitlines() if target in line]
    assert sorted("f8e4m3fn[" in line for line in lines) == [False, True]
    assert np.all(np.isfinite(run(X)))
