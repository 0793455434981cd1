"""Many calls at once: independent ones, programs in flight, and the same again."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import on_ranks, tp_mesh

import jax_ub as ub


def test_many_independent_calls_of_one_program():
    xs = [small_integers(i, (8, 6)) for i in range(32)]
    w = small_integers(99, (6, 12))

    def function(xs, w):
        return [ub.all_gather_matmul(x, w, axis_name="tp") for x in xs]

    run = on_ranks(function, tp_mesh(4), (P("tp"), P(None, "tp")), P(None, "tp"))
    for _ in range(5):
        assert_equal(run(xs, w), [x @ w for x in xs])


def test_calls_run_concurrently_with_collectives_of_xla():
    xs = [small_integers(i, (8, 12)) for i in range(12)]

    def function(xs):
        ours = [ub.all_reduce(x, axis_name="tp") for x in xs]
        return ours, [lax.psum(x, "tp") for x in xs]

    run = on_ranks(function, tp_mesh(4), P("tp"), P())
    for _ in range(5):
        ours, native = run(xs)
        assert_equal(ours, native)


def test_two_programs_in_flight():
    x, w, v = (small_integers(i, (8, 8)) for i in range(3))

    def program(kernel_spec, out_spec, call):
        return on_ranks(call, tp_mesh(4), (P("tp"), kernel_spec), out_spec)

    first = program(
        P(None, "tp"),
        P(None, "tp"),
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
    )
    second = program(
        P(None, "tp"),
        P(None, "tp"),
        lambda x, w: 2 * ub.all_gather_matmul(x, w, axis_name="tp"),
    )
    for _ in range(10):
        results = [f(x, k) for _ in range(8) for f, k in ((first, w), (second, v))]
        assert_equal(results[::2], [x @ w] * 8)
        assert_equal(results[1::2], [2 * (x @ v)] * 8)


def test_the_same_call_a_thousand_times():
    x, w = small_integers(0, (8, 8)), small_integers(1, (8, 8))

    def function(x, w):
        def body(_, total):
            y = ub.matmul_reduce_scatter(
                jnp.broadcast_to(total[:1], x.shape) * 0 + x, w, axis_name="tp"
            )
            return total + y

        start = lax.pcast(jnp.zeros((2, 8)), "tp", to="varying")
        return lax.fori_loop(0, 1000, body, start)

    run = on_ranks(function, tp_mesh(4), (P(None, "tp"), P("tp")), P("tp"))
    assert_equal(run(jnp.tile(x, (1, 4)), jnp.tile(w, (4, 1))), 4000 * (x @ w))


def test_one_program_launched_a_thousand_times():
    x = small_integers(0, (4, 3))
    run = on_ranks(lambda x: ub.all_reduce(x, axis_name="tp"), tp_mesh(4), P("tp"), P())
    expected = jnp.sum(x, 0, keepdims=True)
    for step in range(1000):
        result = run(x)
        if step % 16 == 0:
            jax.block_until_ready(result)
    assert_equal(result, expected)
