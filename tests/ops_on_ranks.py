"""Runs operations and their gradients on the ranks of a mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import on_ranks, tp_mesh
from random_parameters import random_parameters

TOKENS, FEATURES = P("tp"), P(None, "tp")


def integers_like(params, seed: int = 0):
    """Replaces parameters by small integers."""
    leaves, tree = jax.tree.flatten(params)
    drawn = [
        small_integers(seed + i, leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


def integers_of(seq, seed: int = 0):
    """Returns the parameters of a Sequential, as small integers."""
    return integers_like(jax.eval_shape(seq.init, jax.random.key(0)), seed)


def random_params(seq):
    """Returns random parameters of a Sequential, and its initial FP8 states."""
    return random_parameters(jax.eval_shape(seq.init, jax.random.key(0)))


def value_and_gradients(function, weights):
    """Jits a function of (params, x, ...): y, and gradients of sum(weights * y)."""

    def loss(*operands):
        y = function(*operands)
        return jnp.sum((y * weights).astype(jnp.float32)), y

    def step(*operands):
        places = tuple(range(len(operands)))
        gradients, y = jax.grad(loss, places, has_aux=True)(*operands)
        return y, gradients

    return jax.jit(step)


def assert_are_plain(cases, plain, num_ranks, x, **options):
    """Compares results and gradients of Sequentials with plain JAX, on integers.

    Args:
        cases: functions for `jax.shard_map`, and specs of their inputs and results.
        plain: the same function of global (params, x).
        num_ranks: the size of the mesh.
        x: the global input.
        **options: of `shard_map`.
    """
    mesh = tp_mesh(num_ranks)
    params = integers_of(cases[0][0])
    shape = jax.eval_shape(plain, params, x)
    weights = small_integers(99, shape.shape, shape.dtype)
    steps = [
        value_and_gradients(
            on_ranks(seq, mesh, (seq.specs(), x_spec), y_spec, **options), weights
        )
        for seq, x_spec, y_spec in cases
    ]
    every = jax.jit(lambda *operands: [step(*operands) for step in steps])
    expected = value_and_gradients(plain, weights)(params, x)
    for actual in every(params, x):
        assert_equal(actual, expected)
