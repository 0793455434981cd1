"""Builds benchmark cases of latency: chains of calls that send almost no data."""

import functools

import jax.numpy as jnp
from jax import lax

import jax_ub as ub
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case, Setup
from jax_ub._src.tools.bench.linear import FORWARD_OPS, Program
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, ROWS, Spec, normal
from jax_ub._src.tools.timing import Candidate

# Dispatching a program costs time once per program, not once per call in it. This time
# cancels in the difference between a chain of 1 + MORE_CALLS calls and a single call.
MORE_CALLS = 100
# Both the tokens per rank and the features in the latency cases: a rank's arrays are
# 16 x 16.
_WIDTH = 16
LATENCY_SHAPE = Shape(_WIDTH, _WIDTH, _WIDTH)


def latency(setup: Setup, shape: Shape) -> list[Case]:
    """Returns a benchmark case for each op: chained calls with 256 elements per rank.

    The size is fixed, so `shape` is ignored. With one rank, the list is empty.
    """
    if setup.num_ranks == 1:
        return []
    found = []
    for name, op in FORWARD_OPS.items():
        links = (_as_link(name, call) for call in (op.own(setup.method), op.naive))
        found.append(_chained_case(setup, name, *links))
    if setup.method == "auto":  # `ub.all_reduce` has no argument `method`
        found.append(all_reduce_latency(setup))
    return found


def all_reduce_latency(setup: Setup) -> Case:
    return _chained_case(
        setup,
        "all_reduce",
        lambda x, w: ub.all_reduce(x, axis_name=AXIS),
        lambda x, w: lax.psum(x, AXIS),
    )


def _as_link(op: str, call: Program) -> Program:
    """Wraps an op so that its result can be the operand of the next call in a chain."""

    def link(x, w):
        rows = x.shape[0] // lax.axis_size(AXIS)
        y = call(x[:rows] if op == "all_gather_matmul" else x, w)
        return jnp.tile(y, (x.shape[0] // y.shape[0], 1))

    return link


def _chained_case(setup: Setup, variant: str, own: Program, xla: Program) -> Case:
    """Returns a benchmark case of an op's latency, without the time of its dispatch.

    `own` is the op in jax_ub, `xla` in plain JAX. Each runs in two programs: a chain of
    1 + MORE_CALLS calls, and one call. The difference of their times, divided by
    MORE_CALLS, is the time of one call.
    """
    ranks, dtype = setup.ranks, setup.dtype
    operands = [
        ranks.place(normal(0, (ranks.num_ranks * _WIDTH, _WIDTH), dtype), ROWS),
        ranks.place(normal(1, (_WIDTH, _WIDTH), dtype, 0.1 * _WIDTH**-0.5), Spec()),
    ]

    def candidate(name, call, calls):
        program = functools.partial(_chain, call, calls)
        jitted = ranks.program(program, (ROWS, Spec()), ROWS)
        return Candidate(name, jitted, operands)

    candidates = [
        candidate(f"{name}{suffix}", call, calls)
        for name, call in ((cases.OWN, own), (cases.BEST, xla))
        for suffix, calls in (("", 1 + MORE_CALLS), ("_once", 1))
    ]
    return setup.case(
        *("latency", LATENCY_SHAPE, candidates),
        num_gemms=0,
        variant=variant,
        calls=MORE_CALLS,
    )


def _chain(call, num_calls, x, w):
    # Without a dependency on the previous result, XLA could run calls concurrently or
    # merge them. Adding the scaled result to x keeps the values near x.
    w = lax.pcast(w, AXIS, to="varying")
    scale = 0.5 / lax.axis_size(AXIS)
    y = x
    for _ in range(num_calls):
        y = x + scale * lax.convert_element_type(call(y, w), x.dtype)
    return y
