"""Training steps that quantize one array by a state of delayed scaling."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_ub as ub

# Arrays of four microbatches, with different amaxes.
XS = jnp.array([1.0, 4.0, 2.0, 3.0])[:, None, None] * jnp.ones((4, 1, 2))


def step(recipe, role="input"):
    """Returns a function (state, x) -> (quantized, next state)."""

    @jax.jit
    def run(state, x):
        def loss(state):
            quantized = ub.quantize(x, recipe, role=role, state=state)
            return jnp.sum(quantized.dequantize(jnp.float32)), quantized

        gradient, quantized = jax.grad(loss, has_aux=True)(state)
        return quantized, ub.fp8.apply_updates(state, gradient)

    return run


def scale_of(amax, margin=0):
    return float(np.float32(1) / (np.float32(448) / np.float32(amax) / 2**margin))


def over_scan(loss, xs):
    return jax.lax.scan(lambda total, x: (total + loss(x), None), 0.0, xs)[0]
