import functools

import jax
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import (
    DTYPES,
    RANK_COUNTS,
    assert_close,
    assert_equal,
    normal,
    small_integers,
)
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
from jax_ub._src.primitives.matmuls import wgrad

ROWS, FEATURES = P(None, "tp"), P(None, None, "tp")


def products(x, dys, main_grads, *, gather, num_ranks, method):
    """Computes wgrads without an accumulator, and with ones of two dtypes."""

    def product(main_grads, out_dtype):
        return wgrad(
            execution(method, num_ranks if gather else None),
            x,
            dys,
            main_grads,
            gather=gather,
            out_dtype=out_dtype,
        )

    sums = product(main_grads, "float32"), product(main_grads, x.dtype)
    return (product(None, x.dtype), *sums)


def on_mesh(function, num_ranks, gather):
    x, dy, dw = {
        "x": (ROWS, FEATURES, P(None, "tp")),
        "dy": (FEATURES, ROWS, P("tp", None)),
        None: (P(), FEATURES, P(None, "tp")),
    }[gather]
    function = functools.partial(function, gather=gather, num_ranks=num_ranks)
    return on_ranks(
        with_methods(function, [Method.DIRECT]), tp_mesh(num_ranks), (x, dy, dw), dw
    )


def operands(make, num_ranks, dtype):
    x = make(0, (2, 3 * num_ranks, 5 * num_ranks), dtype)
    dys = tuple(make(n, (2, 3 * num_ranks, n * num_ranks), dtype) for n in (7, 2))
    sums = tuple(make(n, (5 * num_ranks, n * num_ranks), "float32") for n in (7, 2))
    return x, dys, sums


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES, gather=["x", "dy", None])
def test_is_exact_on_small_integers(num_ranks, dtype, gather):
    run = on_mesh(products, num_ranks, gather)
    expected, actual = run(*operands(small_integers, num_ranks, dtype))
    assert_equal(actual["direct"], expected)


@covering(gather=["x", "dy", None], dtype=DTYPES)
def test_is_close_on_normal_values(dtype, gather):
    x, dys, main_grads = operands(normal, 4, dtype)
    expected, actual = on_mesh(products, 4, gather)(x, dys, main_grads)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for dw, wanted in pairs:
        assert_close(dw, wanted, x.shape[0] * x.shape[1] + 1)


@pytest.mark.parametrize("gather", ["x", "dy"])
def test_reads_the_peers_without_gathering(gather):
    x, dys, _ = operands(small_integers, 4, "float32")

    def function(x, dys):
        direct = execution(Method.DIRECT, 4)
        return wgrad(direct, x, dys, gather=gather, out_dtype="float32")

    specs = (ROWS, FEATURES) if gather == "x" else (FEATURES, ROWS)
    kernel = P(None, "tp") if gather == "x" else P("tp")
    text = compiled_text(on_ranks(function, tp_mesh(4), specs, kernel), x, dys)
    assert calls(text) == {"wgrad": 1}
    assert not collectives(text)


@pytest.mark.parametrize("gather", [None, "x", "dy"])
def test_scale_is_that_of_the_sum_only(gather):
    def function(x, dys, main_grads, *, gather, num_ranks, method):
        return wgrad(
            execution(method, num_ranks if gather else None),
            x,
            dys,
            main_grads,
            gather=gather,
            scale=0.5,
            out_dtype="float32",
        )

    x, dys, sums = operands(small_integers, 3, "bfloat16")
    reference, actual = on_mesh(function, 3, gather)(x, dys, sums)
    rows = x.astype("float32").reshape(-1, 15)
    expected = tuple(
        dw + rows.T @ dy.astype("float32").reshape(18, -1) / 2
        for dy, dw in zip(dys, sums, strict=True)
    )
    assert_equal(reference, expected)
    assert_equal(actual["direct"], expected)
