import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from flax_models import linen_specs, mesh_of, random_variables
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal

from jax_ub.flax import linen

X = (4, 8, 16)
DROPS = {"hidden": {"hidden_dropout": 0.5}, "attention": {"attention_dropout": 0.5}}


def same_everywhere(layer):
    """Returns parameters and tokens with equal results for all tokens and heads."""
    init = functools.partial(layer.init, deterministic=True)
    variables = jax.eval_shape(init, jax.random.key(0), jnp.ones(X))
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), variables)
    return variables, jnp.broadcast_to(normal(0, (16,)), X)


def run(layer, variables, x, key, **options):
    rngs = {"dropout": jax.random.key(key)}
    return layer.apply(variables, x, rngs=rngs, **options)


@pytest.mark.parametrize("drop", ["attention", *nightly("hidden")])
def test_initialization_needs_no_deterministic_argument(drop):
    layer = linen.TransformerLayer(16, 32, 4, **DROPS[drop])
    found = layer.init(jax.random.key(0), jnp.ones(X))
    explicit = layer.init(jax.random.key(0), jnp.ones(X), deterministic=True)
    assert_equal(found, explicit)
    with pytest.raises(ValueError, match="deterministic"):
        layer.apply(found, jnp.ones(X))


@covering(drop=["attention", *nightly("hidden")], types=["explicit", *nightly("auto")])
def test_dropout_depends_on_the_key_and_can_be_disabled(drop, types):
    plain = linen.TransformerLayer(16, 32, 4, dtype=jnp.bfloat16)
    layer = dataclasses.replace(plain, **DROPS[drop])
    x = normal(0, X).astype(jnp.bfloat16)
    with jax.set_mesh(mesh_of(2, 2, types)):
        variables = random_variables(layer, x)
        apply = jax.jit(run, static_argnums=(0,), static_argnames="deterministic")
        y, again, other = (
            apply(layer, variables, x, key, deterministic=False) for key in (1, 1, 2)
        )
        kept = apply(layer, variables, x, 1, deterministic=True)
        # The attribute of the module replaces the argument of the call.
        eager = dataclasses.replace(layer, deterministic=True)
        assert_equal(apply(eager, variables, x, 1), kept)
        assert_equal(apply(plain, variables, x, 1), kept)
    assert_equal(y, again)
    assert not jnp.allclose(y, other)
    assert not jnp.allclose(y, kept)


def test_dropout_needs_a_deterministic_argument():
    layer = linen.MultiHeadAttention(4, dropout_rate=0.5, num_kv_heads=2)
    with jax.set_mesh(mesh_of(1, 2)):
        variables = random_variables(layer, jnp.ones(X))
        with pytest.raises(ValueError, match='"deterministic" must be passed'):
            run(layer, variables, jnp.ones(X), 0)


@covering(drop=DROPS, axes=[{"dp", "tp"}, {"dp"}])
def test_ranks_of_a_shard_map_have_different_dropout_masks(drop, axes):
    options = DROPS[drop]
    layer = linen.TransformerLayer(16, 32, 4, is_causal=False, **options)
    variables, x = same_everywhere(layer)
    specs = linen_specs(variables) if "tp" in axes else P()
    tokens = P("dp", "tp") if "tp" in axes else P("dp")
    with jax.set_mesh(mesh_of(2, 2)):
        y = jax.jit(
            jax.shard_map(
                lambda variables, x: run(layer, variables, x, 0, deterministic=False),
                in_specs=(specs, tokens),
                out_specs=tokens,
                axis_names=axes,
            )
        )(variables, x)
    first, second = y[:2], y[2:]
    assert not np.allclose(first, second)
    if "hidden_dropout" in options:
        assert not np.allclose(y[:, :4], y[:, 4:])


def test_heads_of_different_ranks_have_different_dropout_masks():
    seen = []

    def attention_fn(q, k, v, *, dropout_rng, **options):
        jax.debug.callback(lambda key: seen.append(bytes(np.asarray(key))), dropout_rng)
        return q

    layer = linen.MultiHeadAttention(
        4, attention_fn=attention_fn, dropout_rate=0.5, deterministic=False
    )
    with jax.set_mesh(mesh_of(2, 2)):
        variables = random_variables(layer, jnp.ones(X))
        jax.effects_barrier()
        seen.clear()
        rngs = {"dropout": jax.random.PRNGKey(0)}
        jax.jit(layer.apply)(variables, jnp.ones(X), rngs=rngs)
        jax.effects_barrier()
    assert len(set(seen)) == 4


def test_without_sequence_parallelism_ranks_have_equal_dropout_masks():
    layer = linen.TransformerLayer(
        16, 32, 4, hidden_dropout=0.5, sequence_parallel=False
    )
    variables = random_variables(layer, jnp.ones(X))
    specs = linen_specs(variables)
    # With different masks, shard_map would reject the result's sharding.
    with jax.set_mesh(mesh_of(2, 2)):
        y = jax.jit(
            jax.shard_map(
                lambda variables, x: run(layer, variables, x, 0, deterministic=False),
                in_specs=(specs, P("dp")),
                out_specs=P("dp"),
            )
        )(variables, normal(0, X))
    assert y.shape == X
