"""Dropout: its mask, its key, and which ranks share one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ops_on_ranks import FEATURES, TOKENS
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops


def apply(op, x, **options):
    keys = {"key": options.pop("key")} if "key" in options else {}
    run = lambda x, keys: ops.Sequential(op)(({},), x, **keys, **options)  # noqa: E731
    return jax.jit(run)(x, keys)


def test_dropout_zeroes_at_its_rate_and_scales_the_rest():
    x = jnp.ones((200, 200))
    y = apply(ops.Dropout(0.25), x, key=jax.random.key(0))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs(np.mean(y == 0) - 0.25) < 0.02
    old_key = jax.random.PRNGKey(0)
    half = apply(ops.Dropout(0.25), x.astype("bfloat16"), key=old_key)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half == 0, y == 0)


def test_a_rate_is_not_rounded_to_the_dtype_of_x():
    x = jnp.full((8, 8), 3, jnp.bfloat16)
    run = lambda x: apply(ops.Dropout(0.1), x, key=jax.random.key(0))  # noqa: E731
    y, transposed = jax.vjp(run, x)
    for found in (y, *transposed(x)):
        assert set(np.unique(found)) == {0, np.float32(3 / 0.9).astype(found.dtype)}


def test_gradient_has_the_same_mask():
    x = jnp.ones((20, 20))
    run = lambda x: apply(ops.Dropout(0.5), x, key=jax.random.key(1))  # noqa: E731
    y, transposed = jax.vjp(run, x)
    np.testing.assert_array_equal(transposed(3 * x)[0], 3 * y)


def test_deterministic_dropout_is_the_identity():
    x, key = jnp.ones((20, 20)), jax.random.key(0)
    for y, transposed in (
        jax.vjp(lambda x: apply(ops.Dropout(0.5), x, deterministic=True), x),
        jax.vjp(lambda x: apply(ops.Dropout(0.0), x, key=key), x),
    ):
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(transposed(x)[0], x)
    with pytest.raises(ub.errors.ShapeContractError, match="draws random numbers, but"):
        apply(ops.Dropout(0.5), x)


def test_each_dropout_draws_a_separate_mask():
    seq = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    y = seq(({}, {}), jnp.ones((100, 100)), key=jax.random.key(0))
    assert abs(np.mean(y != 0) - 0.25) < 0.03


@pytest.mark.parametrize("axis_name, check_vma", [(None, True), ("tp", False)])
def test_ranks_with_different_shards_draw_different_masks(axis_name, check_vma):
    op = ops.Dropout(0.5, axis_name=axis_name)
    run = lambda x, key: apply(op, x, key=key)  # noqa: E731
    x, key = jnp.ones((8, 32)), jax.random.key(0)
    for spec, axis in ((TOKENS, 0), (FEATURES, 1)):
        y = on_ranks(run, tp_mesh(2), (spec, P()), spec, check_vma=check_vma)(x, key)
        first, second = np.split(np.asarray(y), 2, axis)
        assert not np.array_equal(first, second)


def test_ranks_with_the_same_values_share_a_mask():
    run = lambda x, key: apply(ops.Dropout(0.5), x, key=key)  # noqa: E731
    x, key = jnp.ones((8, 32)), jax.random.key(0)
    y = on_ranks(run, tp_mesh(2), (P(), P()), P())(x, key)
    np.testing.assert_array_equal(y, run(x, key))
    shards = [np.asarray(shard.data) for shard in y.addressable_shards]
    np.testing.assert_array_equal(*shards)
