from covering import covering
from jax.sharding import PartitionSpec as P
from operands import DTYPES, RANK_COUNTS, assert_equal, normal
from programs import (
    calls,
    collectives,
    compiled_text,
    execution,
    on_ranks,
    tp_mesh,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.collectives import all_gather


def run(num_ranks, method):
    def function(x):
        return all_gather(execution(method, num_ranks), x)

    # Every rank returns all rows. The results are concatenated, so that all of them are
    # compared.
    specs = (P(None, "tp"),)
    return on_ranks(function, tp_mesh(num_ranks), specs, P(None, None, "tp"))


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_every_rank_has_all_rows(num_ranks, dtype):
    x = normal(0, (2, 3 * num_ranks, 7), dtype)
    expected = run(num_ranks, Method.XLA)(x)
    assert_equal(run(num_ranks, Method.DIRECT)(x), expected)


def test_is_one_call_and_no_collective():
    text = compiled_text(run(4, Method.AUTO), normal(0, (1, 4, 3)))
    assert calls(text) == {"all_gather": 1}
    assert not collectives(text)
