"""The training loss, and a variant with only the linear layers for timing."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lm.model import LanguageModel


def language_loss(
    model: LanguageModel, inputs: jax.Array, targets: jax.Array
) -> jax.Array:
    """Sums -log p(next byte) over all tokens.

    Args:
        model: this device's shard of the model.
        inputs: this device's tokens [B, S/P].
        targets: the byte after each token, for all tokens [B, S].
    """
    return cross_entropy(model(inputs), targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Sums -log p(target) over all tokens, from logits sharded over the vocabulary.

    Args:
        logits: this device's part of the vocabulary, f32 [B, S, vocabulary/P].
        targets: target bytes [B, S].
    """
    highest = lax.pmax(lax.stop_gradient(logits).max(axis=-1), "tp")
    vocabulary = logits.shape[-1]
    own = lax.axis_index("tp") * vocabulary + jnp.arange(vocabulary)
    target = jnp.where(targets[..., None] == own, logits, 0.0).sum(axis=-1)
    total = jnp.exp(logits - highest[..., None]).sum(axis=-1)
    target, total = lax.psum((target, total), "tp")
    return (highest + jnp.log(total) - target).sum()


def linear_layers_loss(
    model: LanguageModel, inputs: jax.Array, targets: jax.Array
) -> jax.Array:
    """Runs the linear layers of `model`, with almost nothing between them.

    The value has no meaning. Its gradient makes the same calls with the same shapes as
    the gradient of `language_loss`, so it times the linear layers. Results are not just
    added, because their gradients would then be equal and XLA would compute only one
    of the GEMMs.
    """
    del targets
    x = model.embed(inputs)
    for block in model.blocks:
        q, k, v = block.qkv(x)
        x = block.attention_out(nnx.sigmoid(q) * k + v, residual=x)
        gate, up = block.gate_up(x)
        x = block.down(nnx.sigmoid(gate) * up, residual=x)
    return jnp.square(model.logits(x)).sum()
