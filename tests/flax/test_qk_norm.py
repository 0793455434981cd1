"""Norms of queries and keys."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import assert_trees_close, loss, mesh_of
from operands import assert_equal, normal
from random_parameters import random_parameters

from jax_ub import flax as layers
from jax_ub.errors import ConfigurationError, UnknownNameError
from jax_ub.flax import linen

X = (4, 8, 16)
MODULES = {"MultiHeadAttention": (4, 16), "TransformerLayer": (16, 32, 4)}


def attention(**options):
    return layers.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options)


def test_rms_norms_have_the_values_and_gradients_of_flax():
    x = normal(0, X)
    flax = nnx.MultiHeadAttention(
        4, 16, normalize_qk=True, decode=False, rngs=nnx.Rngs(0)
    )
    flax.query_ln = nnx.RMSNorm(4, rngs=nnx.Rngs(1))
    flax.key_ln = nnx.RMSNorm(4, rngs=nnx.Rngs(1))
    state = nnx.to_pure_dict(nnx.state(flax, nnx.Param))
    noisy = random_parameters(state)
    nnx.update(flax, noisy)
    expected = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(flax, x)
    with jax.set_mesh(mesh_of(2, 2)):
        model = attention(qk_norm_type="RMSNorm")
        assert isinstance(model.query_ln, nnx.RMSNorm)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(
            jnp.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param))
        )
        nnx.update(model, noisy)
        found = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(model, x)
    assert_trees_close(found[0], expected[0], rtol=1e-4)
    (ours, dx), (theirs, expected_dx) = found[1], expected[1]
    assert_trees_close(nnx.to_pure_dict(ours), nnx.to_pure_dict(theirs))
    assert_trees_close(dx, expected_dx)


def test_layer_norm_is_what_flax_calls_normalize_qk():
    named, of_flax = attention(qk_norm_type="LayerNorm"), attention(normalize_qk=True)
    assert isinstance(named.query_ln, nnx.LayerNorm)
    states = (nnx.to_pure_dict(nnx.state(model)) for model in (named, of_flax))
    assert_equal(*states)
    assert attention().query_ln is None
    of_linen = [
        linen.MultiHeadAttention(4, **options).init(jax.random.key(0), jnp.ones(X))
        for options in ({"qk_norm_type": "LayerNorm"}, {"normalize_qk": True})
    ]
    assert_equal(*of_linen)


REFUSED = [
    (
        {"qk_norm_type": "RMSNorm", "normalize_qk": True},
        ConfigurationError,
        'qk_norm_type = "RMSNorm" and normalize_qk = True, .* Leave normalize_qk out',
    ),
    (
        {"qk_norm_type": "L2Normalization"},
        UnknownNameError,
        "qk_norm_type = 'L2Normalization' is not known. .*'RMSNorm', 'LayerNorm'",
    ),
    ({"normalize_qk": "RMSNorm"}, UnknownNameError, "Pass True or False"),
]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_other_norms_are_rejected(name, options, error, message):
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        getattr(layers, name)(*MODULES[name], rngs=nnx.Rngs(0), **options)
    sizes = (4,) if name == "MultiHeadAttention" else MODULES[name]
    with pytest.raises(error, match=f"^{name}: .*{message}"):
        module = getattr(linen, name)(*sizes, **options)
        jax.eval_shape(module.init, jax.random.key(0), jnp.ones(X))
