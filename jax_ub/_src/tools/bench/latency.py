"""Builds the benchmark cases of latency: chains of calls that move almost no data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_ub as ub
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Setup, Shape
from jax_ub._src.tools.bench.machine import AXIS, Spec, normal
from jax_ub._src.tools.bench.timing import Candidate

# Number of further calls in a chain. The dispatch of a program costs time once per
# program, not once per call. It cancels in the difference between the times of a
# program with one call and a program with this many more.
MORE_CALLS = 100
_ROWS, _WIDTH = 16, 16
SHAPE = Shape(_ROWS, _WIDTH, _WIDTH)

# A function of x and w whose result has the shape of x.
Call = Callable[[jax.Array, jax.Array], jax.Array]


def latency(setup: Setup, shape: Shape) -> list[Case]:
    """Returns a benchmark case for each op, of chained calls on 256 elements per rank.

    The size is fixed, so `shape` is ignored. With one rank, the list is empty.
    """
    if setup.num_ranks == 1:
        return []
    num_ranks = setup.num_ranks
    options: dict[str, Any] = {"axis_name": AXIS, "method": setup.method}
    rows = _ROWS // num_ranks

    def tiled(scatter):
        # The result has a rank's rows only, but the next call of the chain takes all
        # rows.
        return lambda x, w: jnp.tile(scatter(x, w), (num_ranks, 1))

    found = [
        latency_case(
            setup,
            "all_gather_matmul",
            lambda x, w: ub.all_gather_matmul(x[:rows], w, **options),
            lambda x, w: peers.naive_column(x[:rows], w),
        ),
        latency_case(
            setup,
            "matmul_reduce_scatter",
            tiled(functools.partial(ub.matmul_reduce_scatter, **options)),
            tiled(peers.naive_row),
        ),
        latency_case(
            setup,
            "matmul_all_reduce",
            functools.partial(ub.matmul_all_reduce, **options),
            peers.naive_all_reduce,
        ),
    ]
    # `ub.all_reduce` has no argument `method`, so it always runs with "auto".
    return found + [all_reduce_latency(setup)] * (setup.method == "auto")


def all_reduce_latency(setup: Setup) -> Case:
    return latency_case(
        setup,
        "all_reduce",
        lambda x, w: ub.all_reduce(x, axis_name=AXIS),
        lambda x, w: peers.all_reduce(x),
    )


def latency_case(setup: Setup, variant: str, own: Call, xla: Call) -> Case:
    """Returns a case that times a long chain of calls and a single call.

    Both run in jax_ub and in XLA. The difference is the time of a call without its
    dispatch.
    """
    ranks, dtype = setup.ranks, setup.dtype
    operands = [
        ranks.place(normal(0, (ranks.num_ranks * _ROWS, _WIDTH), dtype), Spec(AXIS)),
        ranks.place(normal(1, (_WIDTH, _WIDTH), dtype, 0.1 * _WIDTH**-0.5), Spec()),
    ]

    def candidate(name, call, calls):
        program = functools.partial(_chain, call, calls, ranks.num_ranks)
        jitted = ranks.program(program, (Spec(AXIS), Spec()), Spec(AXIS))
        return Candidate(name, jitted, operands)

    candidates = [
        candidate(f"{name}{suffix}", call, calls)
        for name, call in ((cases.OWN, own), (cases.BEST, xla))
        for suffix, calls in (("", 1 + MORE_CALLS), ("_once", 1))
    ]
    return setup.case(
        "latency", SHAPE, candidates, num_gemms=0, variant=variant, calls=MORE_CALLS
    )


def _chain(call, num_calls, num_ranks, x, w):
    # Without a dependency on the previous result, XLA could run calls concurrently or
    # merge them. Adding the scaled result to x keeps the values near x.
    w = lax.pcast(w, AXIS, to="varying")
    y = x
    for _ in range(num_calls):
        y = x + 0.5 / num_ranks * lax.convert_element_type(call(y, w), x.dtype)
    return y
