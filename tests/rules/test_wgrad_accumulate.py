import jax
import jax.numpy as jnp
import pytest
from operands import DTYPES, assert_equal, small_integers
from programs import calls, compiled_text, copies

import jax_ub as ub


def operands(dtype="float32", rows=(2, 5)):
    x, dy = small_integers(0, (*rows, 7), dtype), small_integers(1, (*rows, 9), dtype)
    return x, dy, small_integers(2, (7, 9))


def plain(x, dy, main_grad):
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return main_grad + x.T.astype("float32") @ dy.astype("float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_exact_on_small_integers(dtype):
    values = operands(dtype)
    assert_equal(jax.jit(ub.wgrad_accumulate)(*values), plain(*values))


@pytest.mark.parametrize("rows", [(), (3,), (1, 2, 3)])
def test_takes_any_batch_axes(rows):
    values = operands(rows=rows)
    assert_equal(ub.wgrad_accumulate(*values), plain(*values))


def test_is_accumulated_in_place_where_the_buffer_is_free():
    x, dy, main_grad = operands()
    step = jax.jit(ub.wgrad_accumulate, donate_argnums=2)
    text = compiled_text(step, x, dy, main_grad)
    assert calls(text) == {"wgrad": 1}
    assert copies(text, "f32[7,9]") == 0
    expected = plain(x, dy, main_grad)
    pointer = main_grad.unsafe_buffer_pointer()
    result = step(x, dy, main_grad)
    assert result.unsafe_buffer_pointer() == pointer
    assert_equal(result, expected)


def test_gradients_are_those_of_the_reference():
    values = operands()
    y, pull = jax.vjp(ub.wgrad_accumulate, *values)
    assert_equal(pull(y), jax.vjp(plain, *values)[1](y))


def test_contract_is_checked():
    x, dy, main_grad = operands()
    error = ub.errors.ShapeContractError
    with pytest.raises(error, match="wgrad_accumulate: dy has shape .2, 4, 9., but"):
        ub.wgrad_accumulate(x, dy[:, :4], main_grad)
    with pytest.raises(
        error, match="wgrad_accumulate: main_grad has shape .9, 7., but"
    ):
        ub.wgrad_accumulate(x, dy, main_grad.T)
    with pytest.raises(error, match="wgrad_accumulate: x is float32 and dy is float16"):
        ub.wgrad_accumulate(x, dy.astype("float16"), main_grad)
    with pytest.raises(error, match=r"x has shape \(0, 5, 7\), which is empty"):
        ub.wgrad_accumulate(x[:0], dy[:0], main_grad)
    with pytest.raises(error, match=r"x has shape \(\), but the op takes \[..., feat"):
        ub.wgrad_accumulate(jnp.ones(()), dy, main_grad)
