import jax
import jax.numpy as jnp
import pytest
from operands import DTYPES, assert_equal, small_integers
from programs import calls, compiled_text, copies

import jax_ub as ub


def operands(dtype="float32", rows=(2, 5)):
    dy = small_integers(0, (*rows, 7), dtype)
    return dy, small_integers(1, (9, 7), dtype), small_integers(2, (*rows, 9), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_exact_on_small_integers(dtype):
    dy, w, residual = operands(dtype)
    wide = residual.astype("float32")
    expected = (dy.astype("float32") @ w.astype("float32").T) + wide
    assert_equal(jax.jit(ub.dgrad_add)(dy, w, residual), expected.astype(dtype))
    assert_equal(jax.jit(ub.dgrad_add)(dy, w, wide), expected)


@pytest.mark.parametrize("rows", [(), (3,), (1, 2, 3)])
def test_takes_any_batch_axes(rows):
    dy, w, residual = operands(rows=rows)
    assert_equal(ub.dgrad_add(dy, w, residual), dy @ w.T + residual)


def test_is_written_into_the_residual_where_that_is_free():
    dy, w, residual = operands()
    step = jax.jit(ub.dgrad_add, donate_argnums=2)
    text = compiled_text(step, dy, w, residual)
    assert calls(text) == {"matmul": 1}
    assert copies(text, "f32[2,5,9]") == 0
    expected = dy @ w.T + residual
    pointer = residual.unsafe_buffer_pointer()
    result = step(dy, w, residual)
    assert result.unsafe_buffer_pointer() == pointer
    assert_equal(result, expected)


def test_residual_that_is_needed_elsewhere_is_copied_and_right():
    dy, w, residual = operands()
    step = jax.jit(lambda *v: (ub.dgrad_add(*v), v[2] + 1))
    assert_equal(step(dy, w, residual), (dy @ w.T + residual, residual + 1))


def test_gradients_are_those_of_the_reference():
    values = operands()

    def plain(dy, w, residual):
        return dy @ w.T + residual

    y, pull = jax.vjp(ub.dgrad_add, *values)
    assert_equal(pull(y), jax.vjp(plain, *values)[1](y))


def test_contract_is_checked():
    dy, w, residual = operands()
    error = ub.errors.ShapeContractError
    with pytest.raises(error, match="dgrad_add: dy .* has N = 7, but w .* has N = 9"):
        ub.dgrad_add(dy, w.T, residual)
    with pytest.raises(error, match="dgrad_add: residual has shape .2, 5, 7., but"):
        ub.dgrad_add(dy, w, dy)
    with pytest.raises(error, match="dgrad_add: residual is int32"):
        ub.dgrad_add(dy, w, residual.astype(jnp.int32))
