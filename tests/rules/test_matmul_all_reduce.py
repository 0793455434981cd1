"""GEMM+AR and AR, with both of JAX's conventions for replicated gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import calls, collectives, compiled_text, dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub

METHODS = ("auto", "direct", "ring_exchange", "pipeline", "external", "xla")
FEATURES, WHOLE = P("dp", None, "tp"), P("dp")


def operands(num_ranks, dtype="float32"):
    x = small_integers(0, (4, 3, 6 * num_ranks), dtype)
    w = small_integers(1, (6 * num_ranks, 5), dtype)
    return x, w, small_integers(2, (5,), dtype), small_integers(3, (4, 3, 5), dtype)


def plain(x, w, b, residual):
    return x @ w + b + residual


def weighted(y):
    return jnp.sum(y.astype(jnp.float32) * small_integers(9, y.shape))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_exact(method, check_vma):
    layer = on_ranks(
        lambda x, w, b, r: ub.matmul_all_reduce(
            x, w, axis_name="tp", bias=b, residual=r, method=method
        ),
        dp_tp_mesh(2, 4),
        (FEATURES, P("tp"), P(), WHOLE),
        WHOLE,
        check_vma=check_vma,
    )
    values, wanted = operands(4), (0, 1, 2, 3)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layer(*v)), wanted))
    expected = jax.value_and_grad(lambda *v: weighted(plain(*v)), wanted)(*values)
    assert_equal(step(*values), expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_may_be_stored_as_out_in(method, check_vma):
    layer = on_ranks(
        lambda x, w, b, r: ub.matmul_all_reduce(
            x,
            w,
            axis_name="tp",
            bias=b,
            residual=r,
            method=method,
            rhs_transposed=True,
        ),
        dp_tp_mesh(2, 4),
        (FEATURES, P(None, "tp"), P(), WHOLE),
        WHOLE,
        check_vma=check_vma,
    )
    x, w, b, residual = operands(4)
    values, wanted = (x, w.T, b, residual), (0, 1, 2, 3)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layer(*v)), wanted))
    expected = jax.value_and_grad(
        lambda x, w, b, r: weighted(plain(x, w.T, b, r)), wanted
    )(*values)
    assert_equal(step(*values), expected)


def test_typed_backward_communicates_nothing():
    x, w, _, _ = operands(4)
    layer = on_ranks(
        lambda x, w: ub.matmul_all_reduce(x, w, axis_name="tp"),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp")),
        P(),
    )
    step = jax.jit(jax.value_and_grad(lambda x, w: weighted(layer(x, w)), (0, 1)))
    text = compiled_text(step, x, w)
    assert calls(text) == {"matmul_all_reduce": 1, "matmul": 1, "wgrad": 1}
    assert not collectives(text)


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("check_vma", [True, False])
def test_frozen_operands_skip_their_gemm(wanted, check_vma):
    x, w, _, _ = operands(4)
    layer = on_ranks(
        lambda x, w: ub.matmul_all_reduce(x, w, axis_name="tp"),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp")),
        P(),
        check_vma=check_vma,
    )
    step = jax.jit(jax.grad(lambda x, w: weighted(layer(x, w)), wanted))
    found = calls(compiled_text(step, x, w))
    assert found["matmul"] == (wanted == 0)
    assert found["wgrad"] == (wanted == 1)


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_addend_that_differs_between_ranks_is_refused(name):
    x, w, b, residual = operands(4)
    spec = P("tp") if name == "bias" else P(None, None, "tp")
    addend = jnp.tile(b, 4) if name == "bias" else jnp.tile(residual, 4)
    layer = on_ranks(
        lambda x, w, a: ub.matmul_all_reduce(x, w, axis_name="tp", **{name: a}),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp"), spec),
        P(),
    )
    message = rf"matmul_all_reduce: {name} varies over \('tp',\).*once, after"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        layer(x, w, addend)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_and_its_gradient_are_exact(check_vma):
    x = small_integers(0, (4, 3, 5))
    function = on_ranks(
        lambda x: ub.all_reduce(x, axis_name="tp"),
        tp_mesh(4),
        P("tp"),
        P(),
        check_vma=check_vma,
    )
    step = jax.jit(jax.value_and_grad(lambda x: weighted(function(x))))
    expected = jax.value_and_grad(lambda x: weighted(x.sum(0, keepdims=True)))(x)
    assert_equal(step(x), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_inside_a_loss_on_the_ranks(check_vma):
    x = small_integers(0, (4, 6))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(ub.all_reduce(x, axis_name="tp") ** 2))(x)

    def native(x):
        return jax.grad(lambda x: jnp.sum(jax.lax.psum(x, "tp") ** 2))(x)

    found, expected = (
        on_ranks(function, tp_mesh(4), P("tp"), P("tp"), check_vma=check_vma)(x)
        for function in (gradient, native)
    )
    assert_equal(found, expected)


def test_all_reduce_of_a_replicated_value_counts_every_rank():
    function = on_ranks(
        lambda x: ub.all_reduce(x, axis_name="tp"), tp_mesh(4), P(), P()
    )
    x = small_integers(0, (3,))
    value, pull = jax.vjp(function, x)
    assert_equal(value, 4 * x)
    assert_equal(pull(x), (4 * x,))
