from covering import covering
from jax.sharding import PartitionSpec as P
from operands import DTYPES, RANK_COUNTS, assert_equal, small_integers
from programs import (
    calls,
    collectives,
    compiled_text,
    execution,
    on_ranks,
    tp_mesh,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.collectives import bulk_reduce_scatter

FEATURES, ROWS = P(None, None, "tp"), P(None, "tp")


def run(num_ranks, method, dtype, dw_dtype):
    def function(x, dys, main_grads, partial):
        return bulk_reduce_scatter(
            execution(method, num_ranks),
            x,
            dys,
            main_grads,
            partial,
            dw_dtype=dw_dtype,
            scattered_dtype=dtype,
        )

    specs = (P(), FEATURES, P(None, "tp"), FEATURES)
    return on_ranks(function, tp_mesh(num_ranks), specs, (P(None, "tp"), ROWS))


def operands(num_ranks, dtype):
    x = small_integers(0, (2, 3 * num_ranks, 5), dtype)
    dys = tuple(
        small_integers(n, (2, 3 * num_ranks, n * num_ranks), dtype) for n in (7, 2)
    )
    main_grads = tuple(small_integers(n, (5, n * num_ranks)) for n in (7, 2))
    return x, dys, main_grads, small_integers(9, (2, 3 * num_ranks, 6 * num_ranks))


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    x, dys, sums, partial = operands(num_ranks, dtype)
    for main_grads, dw_dtype in ((None, dtype), (sums, "float32")):
        values = (x, dys, main_grads, partial)
        expected = run(num_ranks, Method.XLA, dtype, dw_dtype)(*values)
        actual = run(num_ranks, Method.BULK, dtype, dw_dtype)(*values)
        assert_equal(actual, expected)


def test_is_one_call_and_no_collective():
    function = run(4, Method.BULK, "float32", "float32")
    text = compiled_text(function, *operands(4, "float32"))
    assert calls(text) == {"bulk_reduce_scatter": 1}
    assert not collectives(text)
