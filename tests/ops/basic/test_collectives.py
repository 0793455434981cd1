"""AllReduce, AllGather and ReduceScatter."""

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import DTYPES, RANK_COUNTS, assert_equal, small_integers
from ops_on_ranks import FEATURES, TOKENS, value_and_gradients
from programs import calls, collectives, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops

RANKS = P("tp")


def own(x):
    """Returns this rank's slice of a global stack with one entry per rank."""
    return x[0]


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_collectives_equal_those_of_jax_lax(num_ranks, dtype):
    """Every rank has a different input, a slice of a global stack."""
    mesh = tp_mesh(num_ranks)
    xs = small_integers(0, (num_ranks, 2 * num_ranks, 3), dtype)
    weights = small_integers(1, (num_ranks, 2 * num_ranks, 3), dtype)
    total = lambda xs: jnp.sum(xs, 0)  # noqa: E731

    def step(op, out_spec):
        seq = ops.Sequential(op)
        return on_ranks(lambda xs: seq(({},), own(xs)), mesh, RANKS, out_spec)

    gather = lambda x: ops.Sequential(ops.AllGather())(({},), x)[None]  # noqa: E731
    gathered_by = on_ranks(gather, mesh, TOKENS, RANKS)
    x = xs[0]

    @jax.jit
    def run(xs):
        return (
            value_and_gradients(step(ops.AllReduce(), P()), weights[0])(xs),
            value_and_gradients(step(ops.ReduceScatter(), TOKENS), weights[0])(xs),
            value_and_gradients(gathered_by, weights)(x),
        )

    (summed, (d_summed,)), (scattered, (d_scattered,)), (gathered, (dx,)) = run(xs)
    assert_equal((summed, scattered), (total(xs), total(xs)))
    expected = jnp.broadcast_to(weights[0], xs.shape)
    assert_equal((d_summed, d_scattered), (expected, expected))
    assert_equal((gathered, dx), (jnp.broadcast_to(x, xs.shape), total(weights)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_replicated_input_counts_once_per_rank(check_vma):
    """All ranks have the same x, but different rows and addends."""
    mesh = tp_mesh(4)
    x, weights = small_integers(0, (8, 3)), small_integers(1, (4, 8, 3))

    def step(op, weights, spread=lambda y: y, out=TOKENS):
        function = lambda x: spread(ops.Sequential(op)(({},), x))  # noqa: E731
        run = on_ranks(function, mesh, P(), out, check_vma=check_vma)
        return value_and_gradients(run, weights)(x)

    y, (dx,) = step(ops.ReduceScatter(), weights[0])
    assert_equal((y, dx), (4 * x, 4 * weights[0]))
    weights = jnp.concatenate([weights] * 4, 1)
    y, (dx,) = step(ops.AllGather(), weights, lambda y: y[None], RANKS)
    assert_equal(y, jnp.broadcast_to(jnp.concatenate([x] * 4), (4, 32, 3)))
    assert_equal(dx, jnp.sum(weights.reshape(4, 4, 8, 3), (0, 1)))
    y, (dx,) = step(ops.AllReduce(), weights[0, :8], out=P())
    assert_equal((y, dx), (4 * x, 4 * weights[0, :8]))
    op = ops.AllReduce(reduce_in_backward=True)
    y, (dx,) = step(op, weights[:, :8], lambda y: y[None], RANKS)
    assert_equal(y, jnp.broadcast_to(4 * x, (4, 8, 3)))
    assert_equal(dx, 4 * jnp.sum(weights[:, :8], 0))


def all_reduce_gradient(reduce_in_backward, check_vma, *, inside):
    """Returns the gradient of x that an AllReduce computes on each of 4 ranks.

    The loss is `sum(weights * y)`. If `inside`, each rank computes the loss, else it is
    computed from the replicated result.
    """
    seq = ops.Sequential(ops.AllReduce(reduce_in_backward=reduce_in_backward))
    xs, weights = small_integers(0, (4, 8, 3)), small_integers(1, (8, 3))
    mesh = tp_mesh(4)
    if inside:
        loss = lambda x: jnp.sum(seq(({},), x) * weights)  # noqa: E731
        gradient = lambda xs: jax.grad(loss)(own(xs))[None]  # noqa: E731
        run = on_ranks(gradient, mesh, RANKS, RANKS, check_vma=check_vma)
        return run(xs), jnp.broadcast_to(weights, xs.shape)
    out = RANKS if reduce_in_backward and check_vma else P()
    spread = lambda y: y[None] if out == RANKS else y  # noqa: E731
    summed = lambda xs: spread(seq(({},), own(xs)))  # noqa: E731
    run = on_ranks(summed, mesh, RANKS, out, check_vma=check_vma)
    _, (dx,) = value_and_gradients(run, weights)(xs)
    return dx, jnp.broadcast_to(weights, xs.shape)


def test_backward_of_all_reduce_is_the_identity():
    for reduce_in_backward in (None, False):
        actual, expected = all_reduce_gradient(reduce_in_backward, True, inside=False)
        assert_equal(actual, expected)
    # With check_vma=False, every rank differentiates a loss that is the same on all
    # ranks.
    actual, expected = all_reduce_gradient(False, False, inside=True)
    assert_equal(actual, expected)


def test_without_check_vma_the_backward_follows_jax():
    actual, expected = all_reduce_gradient(None, False, inside=False)
    assert_equal(actual, expected)
    actual, expected = all_reduce_gradient(True, False, inside=False)
    assert_equal(actual, expected)
    # The gradients of the four ranks are summed.
    actual, expected = all_reduce_gradient(True, False, inside=True)
    assert_equal(actual, 4 * expected)


def test_reduce_in_backward_sums_the_gradients_of_varying_results():
    xs, weights = small_integers(0, (4, 8, 3)), small_integers(1, (4, 8, 3))
    seq = ops.Sequential(ops.AllReduce(reduce_in_backward=True))
    run = on_ranks(lambda xs: seq(({},), own(xs))[None], tp_mesh(4), RANKS, RANKS)
    step = value_and_gradients(run, weights)
    y, (dx,) = step(xs)
    assert_equal(y, jnp.broadcast_to(jnp.sum(xs, 0), xs.shape))
    assert_equal(dx, jnp.broadcast_to(jnp.sum(weights, 0), xs.shape))
    text = compiled_text(step, xs)
    assert calls(text) == {"all_reduce": 2}


def test_identity_costs_no_collective():
    xs = small_integers(0, (4, 8, 3))
    seq = ops.Sequential(ops.AllReduce())
    run = on_ranks(lambda xs: seq(({},), own(xs)), tp_mesh(4), RANKS, P())
    gradient = jax.jit(jax.grad(lambda xs: jnp.sum(run(xs))))
    text = compiled_text(gradient, xs)
    assert not calls(text)
    assert not collectives(text)


def test_wrong_operands_are_rejected():
    error = ub.errors.ShapeContractError

    def call(op, x, spec=TOKENS):
        return on_ranks(lambda x: ops.Sequential(op)(({},), x), tp_mesh(2), spec, P())(
            x
        )

    integers, empty = jnp.ones((4, 4), int), jnp.zeros((0, 4))
    for op in (ops.AllReduce(), ops.AllGather(), ops.ReduceScatter()):
        with pytest.raises(error, match=rf"\({op.label}\): .*x is int32, but the op"):
            call(op, integers)
        with pytest.raises(error, match=r"shape \(0, 4\), which is empty"):
            call(op, empty)
        with pytest.raises(error, match="axis_name = 'tp' is not a manual mesh axis"):
            ops.Sequential(op)(({},), jnp.ones((4, 4)))
    for op in (ops.AllGather(), ops.ReduceScatter()):
        with pytest.raises(error, match=r"shape \(2,\), but the op takes \[..., rows"):
            call(op, jnp.ones(4))
    with pytest.raises(error, match="3 rows .axis -2., which do not divide into 2"):
        call(ops.ReduceScatter(), jnp.ones((3, 4)), FEATURES)
