import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import DTYPES, RANK_COUNTS
from summed_products import (
    METHODS,
    assert_close_and_repeatable,
    assert_exact_on_small_integers,
    assert_one_call,
)

from jax_ub._src.primitives.matmuls import matmul_all_reduce


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    assert_exact_on_small_integers(matmul_all_reduce, P(), num_ranks, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values_and_bitwise_repeatable(dtype):
    assert_close_and_repeatable(matmul_all_reduce, P(), dtype)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    assert_one_call(matmul_all_reduce, P(), method, "matmul_all_reduce")
