"""All-reduces, with and without bias and residual."""

import functools

import jax
import jax.numpy as jnp
import pytest
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
    with_methods,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.collectives import all_reduce

SHAPES = ((), (3,), (2, 3, 5))
# Every method of the engine, without "bulk".
METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)


def sums(xs, *, num_ranks, method):
    return [all_reduce(execution(method, num_ranks), x) for x in xs]


def sums_with_addends(x, bias, residual, *, num_ranks, method):
    run = execution(method, num_ranks)
    return [
        all_reduce(run, x, bias, residual),
        all_reduce(run, x, bias),
        all_reduce(run, x, residual=residual),
    ]


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    xs = [small_integers(0, (num_ranks, *shape), dtype) for shape in SHAPES]
    function = functools.partial(sums, num_ranks=num_ranks)
    function = with_methods(function, [Method.DIRECT])
    # The result is the same on every rank, and its type says so: out_specs P().
    expected, actual = on_ranks(function, tp_mesh(num_ranks), P("tp"), P())(xs)
    assert_equal(actual["direct"], expected)


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_with_addends(num_ranks, dtype):
    function = functools.partial(sums_with_addends, num_ranks=num_ranks)
    function = with_methods(function, METHODS)
    run = on_ranks(function, tp_mesh(num_ranks), (P(None, "tp"), P(), P()), P())
    expected, actual = run(
        small_integers(0, (2, 3 * num_ranks, 5), dtype),
        small_integers(1, (5,), "float32"),
        small_integers(2, (2, 3, 5), dtype),
    )
    for method in METHODS:
        assert_equal(actual[method.value], expected)


# In a process of one rank, 64 KiB of f32 sums are divided among the processes.
@pytest.mark.parametrize("shape", [(1, 20000), (500, 40)])
def test_a_large_sum_with_addends_is_exact(shape):
    function = functools.partial(sums_with_addends, num_ranks=2)
    function = with_methods(function, [Method.DIRECT])
    run = on_ranks(function, tp_mesh(2), (P("tp"), P(), P()), P())
    expected, actual = run(
        small_integers(0, (2 * shape[0], shape[1])),
        small_integers(1, shape[1:]),
        small_integers(2, shape),
    )
    assert_equal(actual["direct"], expected)


def test_addends_are_rounded_with_the_sum():
    # 256 + 1 + 1 = 258 in bf16, but 256 + 1 is rounded to 256.
    def total(x, bias, residual):
        return all_reduce(execution(Method.DIRECT, 2), x, bias, residual)

    run = on_ranks(total, tp_mesh(2), (P("tp"), P(), P()), P())
    ones = jnp.ones((1, 3), jnp.bfloat16)
    y = run(128 * jnp.ones((2, 3), jnp.bfloat16), ones[0], ones)
    assert_equal(y, 258 * ones)


@pytest.mark.parametrize("maps_bias", [False, True])
def test_batches(maps_bias):
    x, bias = small_integers(0, (3, 4, 5)), small_integers(1, (3, 5))
    axes = (0, 0 if maps_bias else None, 0)

    def total(x, bias, residual):
        def one(*operands):
            return all_reduce(execution(Method.DIRECT, 2), *operands)

        return jax.vmap(one, axes)(x, bias if maps_bias else bias[0], residual)

    run = on_ranks(total, tp_mesh(2), (P(None, "tp"), P(), P()), P())
    residual = small_integers(2, (3, 2, 5))
    expected = x[:, :2] + x[:, 2:] + residual
    expected += bias[:, None] if maps_bias else bias[0]
    assert_equal(run(x, bias, residual), expected)


def test_is_one_call_and_no_collective():
    function = functools.partial(sums, num_ranks=4, method=Method.AUTO)
    run = on_ranks(function, tp_mesh(4), P("tp"), P())
    text = compiled_text(run, [small_integers(0, (4, 3))])
    assert calls(text) == {"all_reduce": 1}
    assert not collectives(text)
