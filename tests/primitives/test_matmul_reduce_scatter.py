import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import (
    CASES,
    calls,
    collectives,
    compiled_text,
    copies,
    on_ranks,
    tp_mesh,
    with_methods,
)

from jax_ub.methods import Method
from jax_ub.overlap_config.choice import Choice
from jax_ub.primitives.matmul_reduce_scatter import matmul_reduce_scatter

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")
SPECS = (FEATURES, P("tp"), P(None, "tp"), P(), ROWS)


def product(xs, ws, bias, residual, *, num_ranks, method, out_dtype, **options):
    return matmul_reduce_scatter(
        xs,
        ws,
        bias,
        residual,
        axis_name=("tp",),
        num_ranks=num_ranks,
        choice=Choice(method),
        label="test",
        out_dtype=out_dtype,
        **options,
    )


def two_ways(xs, ws, transposed, bias, residual, **where):
    """Kernels as they are with what is added; and transposed without."""
    return (
        product(xs, ws, bias, residual, out_dtype=xs[0].dtype, **where),
        product(
            xs,
            transposed,
            None,
            None,
            rhs_transposed=True,
            out_dtype="float32",
            **where,
        ),
    )


def operands(make, num_ranks, dtype):
    features = (5 * num_ranks, 7 * num_ranks)
    xs = tuple(make(k, (2, 3 * num_ranks, k), dtype) for k in features)
    ws = tuple(make(k + 1, (k, 11), dtype) for k in features)
    bias, residual = make(4, (11,), "float32"), make(5, (2, 3 * num_ranks, 11), dtype)
    return xs, ws, tuple(w.T for w in ws), bias, residual


@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=num_ranks), METHODS)
    run = on_ranks(function, tp_mesh(num_ranks), SPECS, ROWS)
    expected, actual = run(*operands(small_integers, num_ranks, dtype))
    for results in actual.values():
        assert_equal(results, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values_and_bitwise_repeatable(dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=8), METHODS)
    run = on_ranks(function, tp_mesh(8), SPECS, ROWS)
    values = operands(normal, 8, dtype)
    expected, actual = run(*values)
    for results in actual.values():
        for y, wanted in zip(results, expected, strict=True):
            assert_close(y, wanted, 8 * (5 + 7))
    for _ in range(10):
        assert_equal(run(*values)[1], actual)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    xs, ws, _, bias, residual = operands(small_integers, 4, "float32")

    def function(xs, ws, bias, residual):
        where = {"num_ranks": 4, "method": method, "out_dtype": "float32"}
        return product(xs, ws, bias, residual, **where)

    run = on_ranks(function, tp_mesh(4), (FEATURES, P("tp"), P(), ROWS), ROWS)
    text = compiled_text(run, xs, ws, bias, residual)
    assert calls(text) == {"matmul_reduce_scatter": 1}
    assert not collectives(text)


@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_scaled_sum_is_added_to_bias_and_residual(num_ranks, dtype):
    def function(xs, ws, transposed, bias, residual, method):
        where = {"num_ranks": num_ranks, "method": method, "out_dtype": "float32"}
        return product(xs, ws, bias, residual, scale=0.5, **where)

    run = on_ranks(with_methods(function, METHODS), tp_mesh(num_ranks), SPECS, ROWS)
    values = operands(small_integers, num_ranks, dtype)
    wide = jax.tree.map(lambda array: array.astype("float32"), values)
    xs, ws, _, bias, residual = wide
    expected = (xs[0] @ ws[0] + xs[1] @ ws[1]) / 2 + bias + residual
    reference, actual = run(*values)
    assert_equal(reference, expected)
    for result in actual.values():
        assert_equal(result, expected)


def test_residual_that_is_needed_afterwards_is_not_copied():
    (x, _), (w, _), _, _, residual = operands(small_integers, 2, "float32")

    def function(x, w, residual):
        where = {"num_ranks": 2, "method": Method.DIRECT, "out_dtype": "float32"}
        y = product((x,), (w,), None, residual, **where)
        return y, jax.nn.relu(residual) + y

    run = jax.jit(
        jax.shard_map(
            function,
            mesh=tp_mesh(2),
            in_specs=(FEATURES, P("tp"), ROWS),
            out_specs=(ROWS, ROWS),
        )
    )
    expected = x @ w + residual
    assert copies(compiled_text(run, x, w, residual), "f32[2,3,11]") == 0
    y, both = run(x, w, residual)
    assert_equal(y, expected)
    assert_equal(both, jax.nn.relu(residual) + expected)
