import pytest
from jax.sharding import PartitionSpec as P
from operands import DTYPES, assert_equal, small_integers
from programs import RANKS, calls, collectives, compiled_text, on_ranks, tp_mesh

from jax_ub.methods import Method
from jax_ub.primitives.all_reduce import all_reduce


def run(num_ranks, method):
    def function(x):
        where = {"axis_name": ("tp",), "num_ranks": num_ranks, "label": "test"}
        return all_reduce(x, method=method, **where)

    # The result is the same on every rank, and its type says so: out_specs P().
    return on_ranks(function, tp_mesh(num_ranks), P("tp"), P())


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5)])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_is_exact_on_small_integers(num_ranks, shape):
    for dtype in DTYPES:
        x = small_integers(0, (num_ranks, *shape), dtype)
        expected = run(num_ranks, Method.XLA)(x)
        assert_equal(run(num_ranks, Method.DIRECT)(x), expected)


def test_is_one_call_and_no_collective():
    text = compiled_text(run(4, Method.AUTO), small_integers(0, (4, 3)))
    assert calls(text) == {"all_reduce": 1}
    assert not collectives(text)
