import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import RANKS, calls, collectives, compiled_text, on_ranks, tp_mesh

from jax_ub.methods import Method
from jax_ub.primitives.matmul_reduce_scatter import matmul_reduce_scatter

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
FEATURES, ROWS = P(None, None, "tp"), P(None, "tp")


def run(num_ranks, method, dtype, **options):
    def function(xs, ws, bias, residual):
        return matmul_reduce_scatter(
            xs,
            ws,
            bias,
            residual,
            axis_name=("tp",),
            num_ranks=num_ranks,
            method=method,
            label="test",
            **{"out_dtype": dtype, **options},
        )

    kernel = P(None, "tp") if options.get("rhs_transposed") else P("tp", None)
    specs = (FEATURES, kernel, P(), ROWS)
    return on_ranks(function, tp_mesh(num_ranks), specs, ROWS)


def operands(make, num_ranks, dtype, transposed=False):
    xs = [
        make(i, (2, 3 * num_ranks, k * num_ranks), dtype) for i, k in ((0, 5), (1, 7))
    ]
    ws = [make(2 + i, (k * num_ranks, 11), dtype) for i, k in ((0, 5), (1, 7))]
    bias, residual = make(4, (11,), "float32"), make(5, (2, 3 * num_ranks, 11), dtype)
    return tuple(xs), tuple(w.T if transposed else w for w in ws), bias, residual


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_is_exact_on_small_integers(num_ranks, method):
    for dtype in DTYPES:
        for options in ({}, {"rhs_transposed": True, "out_dtype": "float32"}):
            transposed = options.get("rhs_transposed", False)
            values = operands(small_integers, num_ranks, dtype, transposed)
            actual = run(num_ranks, method, dtype, **options)(*values)
            expected = run(num_ranks, Method.XLA, dtype, **options)(*values)
            assert_equal(actual, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype, method):
    xs, ws, _, _ = operands(normal, 4, dtype)
    actual = run(4, method, dtype)(xs, ws, None, None)
    expected = run(4, Method.XLA, dtype)(xs, ws, None, None)
    assert_close(actual, expected, sum(x.shape[-1] for x in xs))


@pytest.mark.parametrize("method", METHODS)
def test_is_bitwise_the_same_every_time(method):
    xs, ws, _, _ = operands(normal, 8, "float32")
    function = run(8, method, "float32")
    first = function(xs, ws, None, None)
    for _ in range(20):
        assert_equal(function(xs, ws, None, None), first)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    values = operands(small_integers, 4, "float32")
    text = compiled_text(run(4, method, "float32"), *values)
    assert calls(text) == {"matmul_reduce_scatter": 1}
    assert not collectives(text)
