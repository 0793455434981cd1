import functools

import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import (
    CASES,
    calls,
    collectives,
    compiled_text,
    on_ranks,
    tp_mesh,
    with_methods,
)

from jax_ub.methods import Method
from jax_ub.primitives.all_gather_matmul import all_gather_matmul

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
ROWS, COLUMNS, FEATURES = P(None, "tp"), P(None, "tp"), P(None, None, "tp")


def product(x, ws, biases, *, num_ranks, method, out_dtype, **options):
    return all_gather_matmul(
        x,
        ws,
        biases,
        axis_name=("tp",),
        num_ranks=num_ranks,
        method=method,
        label="test",
        out_dtype=out_dtype,
        **options,
    )


def two_ways(x, ws, transposed, biases, **where):
    """Kernels as they are with a bias and the gathered x; and transposed without."""
    plain, gathered = product(
        x, ws, biases, return_gathered=True, out_dtype=x.dtype, **where
    )
    others, nothing = product(
        x, transposed, None, rhs_transposed=True, out_dtype="float32", **where
    )
    assert nothing is None
    return plain, gathered, others


def operands(make, num_ranks, dtype):
    x = make(0, (2, 3 * num_ranks, 13), dtype)
    ws = make(1, (13, 5 * num_ranks), dtype), make(2, (13, 7 * num_ranks), dtype)
    biases = make(3, (5 * num_ranks,), "float32"), make(4, (7 * num_ranks,), dtype)
    return x, ws, tuple(w.T for w in ws), biases


@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=num_ranks), METHODS)
    specs = (ROWS, COLUMNS, P("tp"), P("tp"))
    run = on_ranks(function, tp_mesh(num_ranks), specs, FEATURES)
    expected, actual = run(*operands(small_integers, num_ranks, dtype))
    for results in actual.values():
        assert_equal(results, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=4), METHODS)
    specs = (ROWS, COLUMNS, P("tp"), P("tp"))
    run = on_ranks(function, tp_mesh(4), specs, FEATURES)
    expected, actual = run(*operands(normal, 4, dtype))
    for plain, gathered, others in actual.values():
        assert_equal(gathered, expected[1])
        for y, wanted in zip(plain + others, expected[0] + expected[2], strict=True):
            assert_close(y, wanted, 13)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    x, ws, _, biases = operands(small_integers, 4, "float32")

    def function(x, ws, biases):
        where = {"num_ranks": 4, "method": method, "out_dtype": "float32"}
        return product(x, ws, biases, **where)[0]

    run = on_ranks(function, tp_mesh(4), (ROWS, COLUMNS, P("tp")), FEATURES)
    text = compiled_text(run, x, ws, biases)
    assert calls(text) == {"all_gather_matmul": 1}
    assert not collectives(text)
