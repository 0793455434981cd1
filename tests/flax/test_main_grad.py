import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import nightly
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax_models import (
    Block,
    assert_trees_close,
    loss,
    loss_and_gradients,
    mesh_of,
    random_variables,
)
from operands import assert_equal, normal
from programs import compiled_text, copies

import jax_ub as ub
from jax_ub.flax import Linear, MainGrad, linen, with_main_grads

NUM_MICROBATCHES = 3


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def expected_gradient(xs):
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    return loss_and_gradients(flax, xs.reshape(-1, 16))[1].kernel[...]


@pytest.mark.parametrize(
    ("dp", "tp", "types", "parallel"),
    [
        (1, 2, "explicit", "row"),
        (2, 2, "auto", "column"),
        (2, 2, "explicit", None),
        pytest.param(1, 2, "auto", "column", marks=pytest.mark.matrix),
        pytest.param(2, 2, "auto", "row", marks=pytest.mark.matrix),
    ],
)
def test_microbatches_accumulate_in_place(dp, tp, types, parallel):
    xs = normal(0, (NUM_MICROBATCHES, 4, 8, 16))
    with jax.set_mesh(mesh_of(dp, tp, types)):
        options = {"main_grad": True, "mesh": jax.sharding.get_mesh()}
        model = Linear(16, 32, parallel=parallel, rngs=nnx.Rngs(0), **options)
        graph, params, main_grad = nnx.split(model, nnx.Param, MainGrad)

        def microbatch(params, main_grad, x):
            return loss(nnx.merge(graph, params, main_grad), x)

        def step(main_grad, params, xs):
            def accumulate(main_grad, x):
                gradients = jax.grad(microbatch, argnums=(0, 1))(params, main_grad, x)
                return gradients[1], jnp.abs(gradients[0].kernel[...]).max()

            return jax.lax.scan(accumulate, main_grad, xs)

        program = jax.jit(step, donate_argnums=0)
        text = compiled_text(program, main_grad, params, xs)
        before = pointers(main_grad.main_grad[...])
        total, kernel_gradients = program(main_grad, params, xs)

    assert pointers(total.main_grad[...]) == before
    local = {"column": (16, 32 // tp), "row": (16 // tp, 32), None: (16, 32)}[parallel]
    if dp == 1:
        assert copies(text, f"f32[{local[0]},{local[1]}]") == 0
    assert_trees_close(total.main_grad[...], expected_gradient(xs))
    assert_trees_close(kernel_gradients, jnp.zeros(NUM_MICROBATCHES))


def test_accumulated_gradients_replace_the_gradients_of_their_kernels():
    def block(make, **options):
        return Block(
            lambda rngs: make(16, 32, rngs=rngs, **options),
            lambda rngs: nnx.Linear(32, 16, rngs=rngs),
            nnx.Rngs(0),
        )

    x = normal(0, (8, 16))
    model, flax = block(Linear, main_grad=True), block(nnx.Linear)
    differentiate = nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, MainGrad)))
    gradients = differentiate(model, x)
    gradients, main_grads = nnx.split_state(gradients, nnx.Param, MainGrad)
    actual = with_main_grads(gradients, main_grads)
    expected = loss_and_gradients(flax, x)[1]
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_trees_close(nnx.to_pure_dict(actual), nnx.to_pure_dict(expected))


def test_a_main_grad_without_the_gradient_of_its_kernel_is_rejected():
    model = Block(
        lambda rngs: Linear(16, 32, main_grad=True, rngs=rngs),
        lambda rngs: Linear(32, 16, main_grad=True, rngs=rngs),
        nnx.Rngs(0),
    )
    _, params, main_grads = nnx.split(model, nnx.Param, MainGrad)
    is_up = nnx.PathContains("up")
    trained, _ = nnx.split_state(params, is_up, ...)
    text = "main_grads has 'down.main_grad', but gradients has no 'down.kernel'. Pass"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        with_main_grads(trained, main_grads)
    actual = with_main_grads(trained, nnx.filter_state(main_grads, is_up))
    assert_equal(actual.up.kernel[...], jnp.zeros((16, 32)))
    with pytest.raises(ub.errors.ShapeContractError, match="main_grads = None is not"):
        with_main_grads(params, None)


@pytest.mark.parametrize("parallel", ["column", *nightly("row", None)])
def test_a_gradient_without_the_accumulator_warns_once(parallel):
    x = normal(0, (4, 8, 16))
    text = "the kernel, which is zero, since it is added to main_grad, but"
    with jax.set_mesh(mesh_of(1, 2)):
        options = {"parallel": parallel, "rngs": nnx.Rngs(0)}
        model = Linear(16, 16, main_grad=True, **options)
        with pytest.warns(UserWarning, match=text):
            _, gradients = loss_and_gradients(model, x)
        loss_and_gradients(model, x[:2])  # warns once
    assert_equal(gradients.kernel[...], jnp.zeros((16, 16)))


def test_linen_keeps_the_accumulator_in_the_collection_of_flax():
    xs = normal(0, (NUM_MICROBATCHES, 4, 8, 16))
    layer = linen.Linear(32, parallel="column", main_grad=True)
    with jax.set_mesh(mesh_of(2, 2)):
        variables = layer.init(jax.random.key(0), xs[0])
        assert variables.keys() == {"params", OVERWRITE_WITH_GRADIENT}

        @jax.jit
        def step(variables, xs):
            def accumulate(main_grad, x):
                def microbatch(variables):
                    return jnp.sum(jnp.sin(layer.apply(variables, x)))

                gradients = jax.grad(microbatch)(
                    {**variables, OVERWRITE_WITH_GRADIENT: main_grad}
                )
                return gradients[OVERWRITE_WITH_GRADIENT], None

            return jax.lax.scan(accumulate, variables[OVERWRITE_WITH_GRADIENT], xs)[0]

        total = step(variables, xs)["main_grad"]
    flax = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    flax.kernel[...] = variables["params"]["kernel"]
    expected = loss_and_gradients(flax, xs.reshape(-1, 16))[1].kernel[...]
    assert_trees_close(total, expected)


def test_a_restored_accumulator_may_be_a_numpy_array():
    x = normal(0, (4, 8, 16))
    layer = linen.Linear(32, parallel="column", main_grad=True)
    with jax.set_mesh(mesh_of(1, 2)):
        variables = random_variables(layer, x)
        restored = jax.tree.map(np.asarray, variables)
        assert_equal(layer.apply(restored, x), layer.apply(variables, x))


def test_the_gradient_of_an_accumulator_in_two_calls_is_rejected():
    x = normal(0, (4, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        model = Linear(16, 16, parallel="column", main_grad=True, rngs=nnx.Rngs(0))
        twice = lambda model, x: jnp.sum(model(model(x)))  # noqa: E731
        assert nnx.jit(twice)(model, x).shape == ()
        gradient = nnx.grad(twice, argnums=nnx.DiffState(0, MainGrad))
        with pytest.raises(
            ub.errors.ShapeContractError,
            match=r"this main_grad went into another call already",
        ):
            nnx.jit(gradient)(model, x)
