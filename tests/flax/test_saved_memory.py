"""What the forward pass of a module saves for the backward pass."""

import jax
import jax.numpy as jnp
import pytest
from covering import nightly
from flax import nnx
from flax_models import random_variables
from operands import normal
from programs import tp_mesh

from jax_ub.flax import LayerNormMLP, linen

WIDTH, HIDDEN, BATCH, TOKENS = 16, 64, 4, 8
INPUT, PRODUCT = (BATCH, TOKENS, WIDTH), (BATCH, TOKENS, HIDDEN)


def saved(library, activation):
    """Returns the shapes of the activations that an MLP saves, in bf16 and in f32."""
    x = normal(0, INPUT, jnp.bfloat16)
    options = {"activation": activation, "dtype": jnp.bfloat16}
    with jax.set_mesh(tp_mesh(2)):
        if library == "nnx":
            model = LayerNormMLP(WIDTH, HIDDEN, rngs=nnx.Rngs(0), **options)
            pullback = jax.vjp(model, x)[1]
        else:
            layer = linen.LayerNormMLP(WIDTH, HIDDEN, **options)
            variables = random_variables(layer, x)
            pullback = jax.vjp(lambda x: layer.apply(variables, x), x)[1]
    arrays = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim == 3]
    return [
        [array.shape for array in arrays if array.dtype == dtype]
        for dtype in (jnp.bfloat16, jnp.float32)
    ]


@pytest.mark.parametrize("library", ["nnx", *nightly("linen")])
def test_norms_and_named_activations_save_only_their_inputs(library):
    assert saved(library, "gelu") == [[INPUT, PRODUCT], []]
    assert saved(library, jax.nn.silu) == [[INPUT, PRODUCT], []]
    assert saved(library, "swiglu") == [[INPUT, PRODUCT, PRODUCT], []]


def test_other_activation_functions_save_what_jax_saves():
    (half, _) = saved("nnx", lambda x: jnp.sin(x) * jnp.cos(x))
    assert len(half) > 2
