"""Builds the benchmark cases of latency: chains of calls that move almost no data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_ub as ub
from jax_ub._src.tools.bench import cases, peers
from jax_ub._src.tools.bench.cases import Case, Place
from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec, normal
from jax_ub._src.tools.bench.timing import Candidate
from jax_ub._src.tools.bench.workloads import Shape

# Dispatching a program costs time once per program, not per call in it. This time
# cancels in the difference between a program of one call and one with this many more.
MORE_CALLS = 100
_ROWS, _WIDTH = 16, 16
SHAPE = Shape(_ROWS, _WIDTH, _WIDTH)

Call = Callable[[jax.Array, jax.Array], jax.Array]


def latency(place: Place, shape: Shape) -> list[Case]:
    """Returns a case for each op that times chained calls with 256 elements per rank.

    The size is fixed, so `shape` is ignored. With one rank, the list is empty.
    """
    if place.num_ranks == 1:
        return []
    calls = _calls(place.method, place.num_ranks)
    # `ub.all_reduce` has no argument `method`, so it always runs with "auto".
    if place.method == "auto":
        calls["all_reduce"] = (
            lambda x, w: ub.all_reduce(x, axis_name=AXIS),
            lambda x, w: peers.all_reduce(x),
        )
    return [_case(place, variant, own, xla) for variant, (own, xla) in calls.items()]


def _calls(method: str, num_ranks: int) -> dict[str, tuple[Call, Call]]:
    """Returns, by op, jax_ub's call and XLA's call; results have the shape of x."""
    where: dict[str, Any] = {"axis_name": AXIS, "method": method}
    rows = _ROWS // num_ranks
    return {
        "all_gather_matmul": (
            lambda x, w: ub.all_gather_matmul(x[:rows], w, **where),
            lambda x, w: peers.naive_column(x[:rows], w),
        ),
        "matmul_reduce_scatter": (
            lambda x, w: _repeated(ub.matmul_reduce_scatter(x, w, **where), num_ranks),
            lambda x, w: _repeated(peers.naive_row(x, w), num_ranks),
        ),
        "matmul_all_reduce": (
            lambda x, w: ub.matmul_all_reduce(x, w, **where),
            lambda x, w: peers.naive_all_reduce(x, w),
        ),
    }


def _repeated(y, num_ranks):
    """Tiles the scattered rows, so that the chain's next call has all rows again."""
    return jnp.tile(y, (num_ranks, 1))


def _case(place, variant, own, xla):
    return Case(
        op="latency",
        variant=variant,
        dtype=place.dtype,
        num_ranks=place.num_ranks,
        shape=SHAPE,
        flops=0,
        candidates=chains(place.ranks, place.dtype, own, xla),
        calls=MORE_CALLS,
    )


def chains(ranks: Ranks, dtype: str, own: Call, xla: Call) -> list[Candidate]:
    """Returns four candidates: a long chain and a single call, in jax_ub and in XLA.

    A chain has `1 + MORE_CALLS` calls. The difference between a long chain and a single
    call is the time of `MORE_CALLS` calls without the program's dispatch.
    """
    operands = [
        ranks.place(normal(0, (ranks.num_ranks * _ROWS, _WIDTH), dtype), Spec(AXIS)),
        ranks.place(normal(1, (_WIDTH, _WIDTH), dtype, 0.1 * _WIDTH**-0.5), Spec()),
    ]

    def candidate(name, call, calls):
        chained = functools.partial(chain, call, calls=calls, num_ranks=ranks.num_ranks)
        program = ranks.program(chained, (Spec(AXIS), Spec()), Spec(AXIS))
        return Candidate(name, program, operands)

    return [
        candidate(f"{name}{suffix}", call, calls)
        for name, call in ((cases.OWN, own), (cases.BEST, xla))
        for suffix, calls in (("", 1 + MORE_CALLS), ("_once", 1))
    ]


def chain(
    call: Call, x: jax.Array, w: jax.Array, calls: int, num_ranks: int
) -> jax.Array:
    """Calls `call(x, w)` repeatedly, so that each call depends on the previous one.

    Returns an array of the shape of x. Its values stay near x.
    """
    # Without a dependency on the previous result, XLA could run calls concurrently or
    # merge them. Adding the scaled result to x keeps the values near x.
    w = lax.pcast(w, AXIS, to="varying")
    y = x
    for _ in range(calls):
        y = x + 0.5 / num_ranks * lax.convert_element_type(call(y, w), x.dtype)
    return y
