"""Extra outputs that become extra inputs."""

import jax
import jax.numpy as jnp
import pytest
from operands import assert_close, assert_equal, small_integers
from ops_fusions import first_of, only
from ops_on_ranks import value_and_gradients

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.checks import mapped_with

NOTHING = {}


def make(name, output_to_caller=True, **options):
    op = ops.MakeExtraOutput(**options)
    return op.with_extra_output_channel(0, name, output_to_caller)


def take(name, **options):
    return ops.AddExtraInput(**options).with_extra_input_channel(0, name)


def run(seq, *operands):
    return seq(({},) * len(seq), *operands)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("fused", [0, 1, 3])
def test_gradients_of_several_readers_are_summed(fused, in_place):
    scale = ops.ConstantScale
    seq = ops.Sequential(
        scale(2.0),
        make("a", False, in_place=in_place),
        scale(3.0),
        take("a", in_place=in_place),
        scale(5.0),
        take("a", in_place=in_place),
    )
    x, weights = small_integers(0, (4, 4)), small_integers(1, (4, 4))
    with only(backward=[first_of(fused)] if fused else []):
        y, (dx,) = value_and_gradients(lambda x: run(seq, x), weights)(x)
    # 2x -> 6x + 2x -> 40x + 2x
    assert_equal((y, dx), (42 * x, 42 * weights))


def test_public_channels_are_also_returned():
    seq = ops.Sequential(make("a"), ops.ConstantScale(2.0), make("b", False), take("a"))
    x = small_integers(0, (4, 4))
    y, a = run(seq, x)
    assert_equal((y, a), (3 * x, x))
    gradient = jax.grad(lambda x: jnp.sum(run(seq, x)[0] + 4 * run(seq, x)[1]))(x)
    assert_equal(gradient, jnp.full((4, 4), 7.0))


def test_extra_inputs_without_a_channel_are_passed_in_order():
    seq = ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        ops.ConstantScale(10.0),
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
    )
    one, two, three = (jnp.full((2,), float(i)) for i in (1, 2, 3))
    y, first, second = run(seq, one, two, three)
    assert_equal((y, first, second), (one * 33, one * 3, one * 33))


def test_residual_equal_to_the_gradient_of_the_product():
    """dy is used twice: in the linear's GEMMs, and as the residual's gradient."""
    seq = ops.Sequential(
        make("a", False, in_place=True), ops.BasicLinear(4, 4), take("a", in_place=True)
    )
    kernel, x = small_integers(0, (4, 4)), small_integers(1, (8, 4))
    weights = small_integers(2, (8, 4))
    plain = lambda kernel, x: x @ kernel + x  # noqa: E731
    expected = value_and_gradients(plain, weights)(kernel, x)
    call = lambda kernel, x: seq((NOTHING, {"kernel": kernel}, NOTHING), x)  # noqa: E731
    for fusions in ({}, {"backward": [first_of(2)]}, {"forward": [first_of(2)]}):
        with only(**fusions):
            assert_equal(value_and_gradients(call, weights)(kernel, x), expected)
    assert_equal(value_and_gradients(call, weights)(kernel, x), expected)


def test_vmap_that_maps_the_result_but_no_extra_output():
    """The extra output has a cotangent, too, although it is equal in all examples."""
    seq = ops.Sequential(ops.ConstantScale(2.0), make("a"), ops.BasicLinear(4, 4))
    kernels, x = small_integers(0, (3, 4, 4)), small_integers(1, (8, 4))
    weights = small_integers(2, (3, 8, 4)), small_integers(3, (3, 8, 4))

    def gradients(layer):
        def loss(kernels, x):
            results = jax.vmap(layer, in_axes=(0, None))(kernels, x)
            return sum(map(jnp.vdot, results, weights))

        return jax.jit(jax.grad(loss, (0, 1)))(kernels, x)

    with only(backward=[first_of(3)]):  # one function to differentiate
        found = gradients(lambda w, x: seq((NOTHING, NOTHING, {"kernel": w}), x))
    assert_equal(found, gradients(lambda w, x: (2 * x @ w, 2 * x)))


def test_second_derivatives_of_a_residual():
    seq = ops.Sequential(make("a", False), ops.GELU(), take("a"))
    x = small_integers(0, (3,))
    found = jax.hessian(lambda x: jnp.sum(run(seq, x)))(x)
    expected = jax.hessian(lambda x: jnp.sum(jax.nn.gelu(x) + x))(x)
    assert_close(found, expected, num_products=1)


def test_a_check_of_mapped_arrays_passes_under_vmap_of_jvp():
    """`DelayedScaling` and main_grads check that `jax.vmap` maps both arrays."""
    x = jnp.arange(3.0)
    square = lambda x: mapped_with(x * x, x, str)  # noqa: E731
    found = jax.vmap(lambda dx: jax.jvp(square, (x,), (dx,))[1])(jnp.eye(3))
    assert_equal(found, jnp.diag(2 * x))


def test_wrong_channels_are_rejected():
    error, unknown = ub.errors.ShapeContractError, ub.errors.UnknownNameError
    with pytest.raises(error, match="MakeExtraOutput: it has no extra output 1, but 1"):
        ops.MakeExtraOutput().with_extra_output_channel(1, "a")
    with pytest.raises(error, match="GELU: it has no extra .* AddExtraInput has one"):
        ops.GELU().with_extra_input_channel(0, "a")
    with pytest.raises(
        error, match="AddExtraInput: 'a b' is not the name of a channel"
    ):
        ops.AddExtraInput().with_extra_input_channel(0, "a b")
    with pytest.raises(unknown, match="MakeExtraOutput: output_to_caller = 7 is not a"):
        ops.MakeExtraOutput().with_extra_output_channel(0, "a", output_to_caller=7)
    with pytest.raises(
        unknown, match="operation 1 .AddExtraInput.*Did you mean 'resid"
    ):
        ops.OperationFuser([make("residual"), take("residul")])
    with pytest.raises(
        unknown, match="no extra output has the channel 'a'. No operation"
    ):
        ops.OperationFuser([take("a")])
    with pytest.raises(
        error, match=r"operation 2 .*already written by operation 0 \(Make"
    ):
        ops.OperationFuser([make("a"), ops.GELU(), make("a")])
    with pytest.raises(error, match=r"which operation 1 \(MakeExtra.* writes later"):
        ops.OperationFuser([take("a"), make("a")])
