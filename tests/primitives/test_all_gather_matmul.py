import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import RANKS, calls, collectives, compiled_text, on_ranks, tp_mesh

from jax_ub.methods import Method
from jax_ub.primitives.all_gather_matmul import all_gather_matmul

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
ROWS, OUT = P(None, "tp"), P(None, None, "tp")


def run(num_ranks, method, dtype, **options):
    def function(x, ws, biases):
        return all_gather_matmul(
            x,
            ws,
            biases,
            axis_name=("tp",),
            num_ranks=num_ranks,
            method=method,
            label="test",
            **{"out_dtype": dtype, **options},
        )

    kernel = P("tp", None) if options.get("rhs_transposed") else P(None, "tp")
    gathered = P(None, "tp") if options.get("return_gathered") else P()
    return on_ranks(
        function, tp_mesh(num_ranks), (ROWS, kernel, P("tp")), (OUT, gathered)
    )


def operands(make, num_ranks, dtype, transposed=False):
    x = make(0, (2, 3 * num_ranks, 13), dtype)
    ws = [make(1, (13, 5 * num_ranks), dtype), make(2, (13, 7 * num_ranks), dtype)]
    biases = make(3, (5 * num_ranks,), "float32"), make(4, (7 * num_ranks,), dtype)
    return x, tuple(w.T if transposed else w for w in ws), biases


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_is_exact_on_small_integers(num_ranks, method):
    for dtype in DTYPES:
        for options in (
            {"return_gathered": True},
            {"rhs_transposed": True, "out_dtype": "float32"},
        ):
            values = operands(
                small_integers, num_ranks, dtype, options.get("rhs_transposed", False)
            )
            actual = run(num_ranks, method, dtype, **options)(*values)
            expected = run(num_ranks, Method.XLA, dtype, **options)(*values)
            assert_equal(actual, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype, method):
    x, ws, _ = operands(normal, 4, dtype)
    actual, _ = run(4, method, dtype)(x, ws, None)
    expected, _ = run(4, Method.XLA, dtype)(x, ws, None)
    for y, wanted in zip(actual, expected, strict=True):
        assert_close(y, wanted, x.shape[-1])


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    values = operands(small_integers, 4, "float32")
    text = compiled_text(run(4, method, "float32"), *values)
    assert calls(text) == {"all_gather_matmul": 1}
    assert not collectives(text)
