"""A rank that never comes: an error within the deadline, and the process goes on."""

import contextlib
import time

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.runtime import cpu_engine

METHODS = ("direct", "ring_exchange", "pipeline", "external")


@contextlib.contextmanager
def short_deadline():
    cpu_engine.configure()  # which would set the timeout at the first call
    cpu_engine.load().set_timeout_s(0.3)
    try:
        yield
    finally:
        cpu_engine.load().set_timeout_s(120.0)


def program(method):
    def function(x, w, come):
        return lax.cond(
            come[0],
            lambda: ub.all_gather_matmul(x, w, axis_name="tp", method=method),
            lambda: lax.pcast(jnp.zeros((8, 3)), "tp", to="varying"),
        )

    specs = (P("tp"), P(None, "tp"), P("tp"))
    return on_ranks(function, tp_mesh(4), specs, P(None, "tp"))


@pytest.mark.parametrize("method", METHODS)
def test_missing_rank_fails_the_others_within_the_deadline(method):
    run = program(method)
    x, w = small_integers(0, (8, 6)), small_integers(1, (6, 12))
    everyone = jnp.ones(4, bool)
    assert_equal(run(x, w, everyone), x @ w)
    begin = time.monotonic()
    timeout = pytest.raises(ub.errors.TimeoutError, match=r"all_gather_matmul.*rank")
    # Only this call has a short deadline, because ranks that are busy with other calls
    # arrive late.
    with short_deadline(), timeout, ub.errors.raised():
        jax.block_until_ready(run(x, w, everyone.at[2].set(False)))
    assert time.monotonic() - begin < 30
    # The process continues, with the same program and with other programs.
    assert_equal(run(x, w, everyone), x @ w)
    assert_equal(program("auto")(x, w, everyone), x @ w)
