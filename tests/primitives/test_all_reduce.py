import functools

import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import (
    CASES,
    calls,
    collectives,
    compiled_text,
    execution,
    on_ranks,
    tp_mesh,
    with_methods,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.collectives import all_reduce

SHAPES = ((), (3,), (2, 3, 5))


def sums(xs, *, num_ranks, method):
    return [all_reduce(execution(method, num_ranks), x) for x in xs]


@pytest.mark.parametrize(("num_ranks", "dtype"), CASES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    xs = [small_integers(0, (num_ranks, *shape), dtype) for shape in SHAPES]
    function = functools.partial(sums, num_ranks=num_ranks)
    function = with_methods(function, [Method.DIRECT])
    # The result is the same on every rank, and its type says so: out_specs P().
    expected, actual = on_ranks(function, tp_mesh(num_ranks), P("tp"), P())(xs)
    assert_equal(actual["direct"], expected)


def test_is_one_call_and_no_collective():
    function = functools.partial(sums, num_ranks=4, method=Method.AUTO)
    run = on_ranks(function, tp_mesh(4), P("tp"), P())
    text = compiled_text(run, [small_integers(0, (4, 3))])
    assert calls(text) == {"all_reduce": 1}
    assert not collectives(text)
