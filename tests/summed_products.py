"""Sums of two products over the ranks, for the tests of GEMM+RS and GEMM+AR."""

import functools

from jax.sharding import PartitionSpec as P
from operands import assert_close, assert_equal, normal, small_integers
from programs import (
    calls,
    collectives,
    compiled_text,
    execution,
    on_ranks,
    tp_mesh,
    with_methods,
)

from jax_ub._src.methods import Method

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
FEATURES = P(None, None, "tp")


def specs_of(result):
    """Returns the specs of `operands`. The residual is sharded as `result`."""
    return FEATURES, P("tp"), P(None, "tp"), P(), result


def operands(make, num_ranks, dtype):
    features = (5 * num_ranks, 7 * num_ranks)
    xs = tuple(make(k, (2, 3 * num_ranks, k), dtype) for k in features)
    ws = tuple(make(k + 1, (k, 11), dtype) for k in features)
    bias, residual = make(4, (11,), "float32"), make(5, (2, 3 * num_ranks, 11), dtype)
    return xs, ws, tuple(w.T for w in ws), bias, residual


def product(op, xs, ws, bias, residual, *, num_ranks, method, out_dtype, **options):
    return op(
        execution(method, num_ranks),
        xs,
        ws,
        bias,
        residual,
        out_dtype=out_dtype,
        **options,
    )


def two_ways(op, xs, ws, transposed, bias, residual, **where):
    """Sums with addends, and by transposed kernels without addends."""
    return (
        product(op, xs, ws, bias, residual, out_dtype=xs[0].dtype, **where),
        product(
            op,
            xs,
            transposed,
            None,
            None,
            rhs_transposed=True,
            out_dtype="float32",
            **where,
        ),
    )


def program(op, result, num_ranks):
    """Computes `two_ways` by the reference and by every method."""
    function = functools.partial(two_ways, op, num_ranks=num_ranks)
    methods = with_methods(function, METHODS)
    return on_ranks(methods, tp_mesh(num_ranks), specs_of(result), result)


def assert_exact_on_small_integers(op, result, num_ranks, dtype):
    run = program(op, result, num_ranks)
    expected, actual = run(*operands(small_integers, num_ranks, dtype))
    for results in actual.values():
        assert_equal(results, expected)


def assert_close_and_repeatable(op, result, dtype):
    run = program(op, result, 8)
    values = operands(normal, 8, dtype)
    expected, actual = run(*values)
    for results in actual.values():
        for y, wanted in zip(results, expected, strict=True):
            assert_close(y, wanted, 8 * (5 + 7))
    for _ in range(10):
        assert_equal(run(*values)[1], actual)


def assert_one_call(op, result, method, target):
    xs, ws, _, bias, residual = operands(small_integers, 4, "float32")

    def function(xs, ws, bias, residual):
        where = {"num_ranks": 4, "method": method, "out_dtype": "float32"}
        return product(op, xs, ws, bias, residual, **where)

    run = on_ranks(function, tp_mesh(4), (FEATURES, P("tp"), P(), result), result)
    text = compiled_text(run, xs, ws, bias, residual)
    assert calls(text) == {target: 1}
    assert not collectives(text)
