import functools
import re

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import calls, compiled_text, copies, execution, with_methods

from jax_ub._src.methods import Method
from jax_ub._src.primitives.matmuls import matmul


def run(method, **options):
    def function(xs, ws, bias, residual):
        return matmul(execution(method), xs, ws, bias, residual, **options)

    return jax.jit(function)


def operands(make, dtype, rows=(2, 3, 5)):
    xs = tuple(make(k, (*rows, k), dtype) for k in (17, 9))
    ws = tuple(make(k + 1, (k, 11), dtype) for k in (17, 9))
    return xs, ws, make(4, (11,), "float16"), make(5, (*rows, 11), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_exact_on_small_integers(dtype):
    def all_ways(xs, ws, transposed, bias, residual, *, method):
        run = functools.partial(matmul, execution(method))
        return [
            (
                run(xs, ws, bias, residual, out_dtype=out),
                run(xs, ws, None, residual, out_dtype=out),
                run(xs, ws, bias, None, out_dtype=out),
                run(xs, transposed, rhs_transposed=True, out_dtype=out),
            )
            for out in DTYPES
        ]

    xs, ws, bias, residual = operands(small_integers, dtype)
    run = jax.jit(with_methods(all_ways, [Method.DIRECT]))
    expected, actual = run(xs, ws, tuple(w.T for w in ws), bias, residual)
    assert_equal(actual["direct"], expected)


@pytest.mark.parametrize("rows", [(1,), (1, 1), (300,), (3, 1, 2, 7)])
def test_takes_any_batch_axes(rows):
    xs, ws, bias, residual = operands(small_integers, "bfloat16", rows=rows)
    options = {"out_dtype": "bfloat16"}
    expected = run(Method.XLA, **options)(xs, ws, bias, residual)
    assert_equal(run(Method.DIRECT, **options)(xs, ws, bias, residual), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype):
    xs, ws = (normal(0, (50, 700), dtype),), (normal(1, (700, 90), dtype),)
    expected = run(Method.XLA, out_dtype=dtype)(xs, ws, None, None)
    actual = run(Method.DIRECT, out_dtype=dtype)(xs, ws, None, None)
    assert_close(actual, expected, 700)


def test_residual_becomes_the_result_in_place():
    x, w = small_integers(0, (8, 16)), small_integers(1, (16, 24))

    def function(x, w, residual):
        auto = execution(Method.AUTO)
        return matmul(auto, (x,), (w,), None, residual, out_dtype="float32")

    donating = jax.jit(function, donate_argnums=2)
    residual = jnp.ones((8, 24))
    pointer = residual.unsafe_buffer_pointer()
    result = donating(x, w, residual)
    assert result.unsafe_buffer_pointer() == pointer
    assert_equal(result, x @ w + 1)
    text = compiled_text(donating, x, w, jnp.ones((8, 24)))
    assert calls(text) == {"matmul": 1}
    assert copies(text, "f32[8,24]") == 0


def test_residual_that_is_needed_elsewhere_stays_what_it_was():
    x, w = small_integers(0, (8, 16)), small_integers(1, (16, 24))
    residual = small_integers(2, (8, 24))
    function = run(Method.AUTO, out_dtype="float32")
    before = residual + 0
    assert_equal(function((x,), (w,), None, residual), x @ w + before)
    assert_equal(residual, before)


@covering(scale=[0.5, -2.0, 0.0], rows=[(1,), (3, 7), (300,)])
def test_scale_is_that_of_the_product_only(scale, rows):
    xs, ws, bias, residual = operands(small_integers, "bfloat16", rows=rows)
    wide = jax.tree.map(lambda array: array.astype("float32"), (xs, ws))
    product = sum(x @ w for x, w in zip(*wide, strict=True))
    expected = scale * product + bias.astype("float32") + residual.astype("float32")
    for method in (Method.DIRECT, Method.XLA):
        scaled = run(method, out_dtype="float32", scale=scale)
        assert_equal(scaled(xs, ws, bias, residual), expected)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_debug_nans_names_the_gemm_whose_result_is_nan(around):
    x = jnp.array([[jnp.inf, -jnp.inf]])

    def function(x, w):
        return matmul(execution(Method.AUTO), (x,), (w,), out_dtype="float32")

    message = re.escape("invalid value (nan) encountered in jax_ub$matmul")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=message):
        around(function)(x, jnp.ones((2, 3)))
