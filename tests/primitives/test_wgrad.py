import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_close, assert_equal, normal, small_integers
from programs import RANKS, calls, collectives, compiled_text, on_ranks, tp_mesh

from jax_ub.methods import Method
from jax_ub.primitives.wgrad import wgrad

ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")


def run(num_ranks, method, dtype, gather):
    def function(x, dys, main_grads):
        return wgrad(
            x,
            dys,
            main_grads,
            gather=gather,
            axis_name=("tp",) if gather else (),
            num_ranks=num_ranks if gather else 1,
            method=method,
            label="test",
            out_dtype=dtype,
        )

    x, dy, dw = {
        "x": (ROWS, FEATURES, P(None, "tp")),
        "dy": (FEATURES, ROWS, P("tp", None)),
        None: (P(), FEATURES, P(None, "tp")),
    }[gather]
    return on_ranks(function, tp_mesh(num_ranks), (x, dy, dw), dw)


def operands(make, num_ranks, dtype):
    x = make(0, (2, 3 * num_ranks, 5 * num_ranks), dtype)
    dys = tuple(make(n, (2, 3 * num_ranks, n * num_ranks), dtype) for n in (7, 2))
    sums = tuple(make(n, (5 * num_ranks, n * num_ranks), "float32") for n in (7, 2))
    return x, dys, sums


@pytest.mark.parametrize("gather", ["x", "dy", None])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_is_exact_on_small_integers(num_ranks, gather):
    for dtype in DTYPES:
        x, dys, sums = operands(small_integers, num_ranks, dtype)
        for main_grads, out_dtype in ((None, dtype), (sums, "float32"), (sums, dtype)):
            values = (x, dys, main_grads)
            actual = run(num_ranks, Method.DIRECT, out_dtype, gather)(*values)
            expected = run(num_ranks, Method.XLA, out_dtype, gather)(*values)
            assert_equal(actual, expected)


@pytest.mark.parametrize("gather", ["x", "dy", None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype, gather):
    x, dys, _ = operands(normal, 4, dtype)
    actual = run(4, Method.DIRECT, dtype, gather)(x, dys, None)
    expected = run(4, Method.XLA, dtype, gather)(x, dys, None)
    for dw, wanted in zip(actual, expected, strict=True):
        assert_close(dw, wanted, x.shape[0] * x.shape[1])


@pytest.mark.parametrize("gather", ["x", "dy"])
def test_reads_the_peers_without_gathering(gather):
    values = operands(small_integers, 4, "float32")
    text = compiled_text(run(4, Method.DIRECT, "float32", gather), *values)
    assert calls(text) == {"wgrad": 1}
    assert not collectives(text)
