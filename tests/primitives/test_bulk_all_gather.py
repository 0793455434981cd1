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
from jax_ub._src.primitives.collectives import bulk_all_gather

FEATURES, ROWS = P(None, None, "tp"), P(None, "tp")


def run(num_ranks, method):
    def function(dys, ws, shard):
        return bulk_all_gather(execution(method, num_ranks), dys, ws, shard)

    # The results of all ranks are concatenated, since they differ or are compared rank
    # by rank.
    specs = (FEATURES, P(None, "tp"), ROWS)
    return on_ranks(function, tp_mesh(num_ranks), specs, (FEATURES, FEATURES))


def operands(num_ranks, dtype):
    dys = tuple(
        small_integers(n, (2, 3 * num_ranks, n * num_ranks), dtype) for n in (7, 2)
    )
    ws = tuple(small_integers(n, (5, n * num_ranks), dtype) for n in (7, 2))
    return dys, ws, small_integers(9, (2, 3 * num_ranks, 6), dtype)


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    values = operands(num_ranks, dtype)
    expected = run(num_ranks, Method.XLA)(*values)
    assert_equal(run(num_ranks, Method.BULK)(*values), expected)


def test_is_one_call_and_no_collective():
    text = compiled_text(run(4, Method.BULK), *operands(4, "float32"))
    assert calls(text) == {"bulk_all_gather": 1}
    assert not collectives(text)
