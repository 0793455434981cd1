import functools

import jax
import pytest

from jax_ub._src import reference
from jax_ub._src.tools.bench import linear_cases, peers
from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec
from jax_ub._src.tools.bench.dots import DotVariant
from tests.operands import assert_equal, small_integers

M, K, N = 16, 8, 24
ROWS, COLUMNS = Spec(AXIS, None), Spec(None, AXIS)
DOT = DotVariant("nn")


def run(function, in_specs, out_spec, num_ranks, *operands):
    return Ranks(num_ranks).program(function, in_specs, out_spec)(*operands)


def operands(dtype="float32"):
    return small_integers(0, (M, K), dtype), small_integers(1, (K, N), dtype)


def ring(function):
    return functools.partial(function, dot=DOT)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("column", [peers.naive_column, ring(peers.ring_gather_dot)])
def test_columns_are_the_gathered_rows_times_the_kernel(column, num_ranks):
    x, w = operands()
    assert_equal(run(column, (ROWS, COLUMNS), COLUMNS, num_ranks, x, w), x @ w)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("row", [peers.naive_row, ring(peers.ring_dot_scatter)])
def test_rows_are_the_scattered_sum(row, num_ranks):
    x, w = operands()
    assert_equal(run(row, (COLUMNS, ROWS), ROWS, num_ranks, x, w), x @ w)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "program",
    [
        peers.naive_all_reduce,
        ring(peers.ring_dot_all_reduce),
        peers.reduced(peers.all_reduce, DOT, "bfloat16"),
        peers.reduced(peers.scatter_and_gather, DOT, "float32"),
    ],
)
def test_every_rank_has_the_whole_sum(program, num_ranks):
    x, w = operands("bfloat16")
    y = run(program, (COLUMNS, ROWS), ROWS, num_ranks, x, w)
    for rank in range(num_ranks):
        assert_equal(y[rank * M : (rank + 1) * M], x @ w)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("op", [linear_cases._PAIR, linear_cases._BACKWARD])
def test_all_pairs_of_linears_have_the_gradients_of_the_reference(op, num_ranks):
    x, w1 = operands()
    w2, dy = small_integers(2, (N, K)), small_integers(3, (M, K))
    hidden = reference.dot(x, w1)

    def forward(x, w1, w2):
        return reference.dot(reference.dot(x, w1), w2)

    y, backward = jax.vjp(forward, x, w1, w2)
    given, wanted = (x, w1, w2, dy), (y, *backward(dy))
    if op is linear_cases._BACKWARD:
        given, wanted = (x, w1, hidden, w2, dy), wanted[1:]
    dots = {
        f"{side}_{way}": DotVariant(way)
        for side in ("column", "row")
        for way in ("nn", "nt", "tn")
    }
    programs = [
        op.naive,
        functools.partial(op.collectives, dots=dots, moved="float32"),
        functools.partial(op.ring, dots=dots),
        op.own("auto"),
        op.own("xla"),
    ]
    for program in programs:
        found = run(program, op.in_specs, op.out_specs, num_ranks, *given)
        assert_equal(tuple(found), wanted)
