"""What is minimised, and its twin that has the linear layers only, to time them."""

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
        model: this device's shard.
        inputs: this device's tokens, [B, S/P].
        targets: the byte after each token, of all tokens, [B, S].
    """
    return cross_entropy(model(inputs), targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Sums -log p(target) over all tokens, from logits sharded over the vocabulary.

    Args:
        logits: f32 [B, S, vocabulary/P].
        targets: [B, S].
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
    """Runs the linear layers of `model`, with next to nothing between them.

    Its value has no meaning. Its gradient takes the same calls, of the same shapes, as
    that of `language_loss`: how long they take together is how long they take there.
    No two results are just added: their gradients would be equal, and XLA would
    multiply by only one of them.
    """
    del targets
    x = model.embed(inputs)
    for block in model.blocks:
        q, k, v = block.qkv(x)
        x = block.attention_out(nnx.sigmoid(q) * k + v, residual=x)
        gate, up = block.gate_up(x)
        x = block.down(nnx.sigmoid(gate) * up, residual=x)
    return jnp.square(model.logits(x)).sum()
