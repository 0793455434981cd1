import jax
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import DTYPES, RANK_COUNTS, assert_equal, small_integers
from programs import compiled_text, copies, on_ranks, tp_mesh, with_methods
from summed_products import (
    FEATURES,
    METHODS,
    assert_close_and_repeatable,
    assert_exact_on_small_integers,
    assert_one_call,
    operands,
    product,
    specs_of,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.matmuls import matmul_reduce_scatter

ROWS = P(None, "tp")


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    assert_exact_on_small_integers(matmul_reduce_scatter, ROWS, num_ranks, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values_and_bitwise_repeatable(dtype):
    assert_close_and_repeatable(matmul_reduce_scatter, ROWS, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    assert_one_call(matmul_reduce_scatter, ROWS, method, "matmul_reduce_scatter")


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_scaled_sum_is_added_to_bias_and_residual(num_ranks, dtype):
    def function(xs, ws, transposed, bias, residual, method):
        where = {"num_ranks": num_ranks, "method": method, "out_dtype": "float32"}
        return product(
            matmul_reduce_scatter, xs, ws, bias, residual, scale=0.5, **where
        )

    specs = specs_of(ROWS)
    run = on_ranks(with_methods(function, METHODS), tp_mesh(num_ranks), specs, ROWS)
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
        y = product(matmul_reduce_scatter, (x,), (w,), None, residual, **where)
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
