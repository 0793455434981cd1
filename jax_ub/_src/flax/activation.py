"""Activation functions of MLP layers, selected by Transformer Engine's names."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ub._src.errors import UnknownNameError, nearest, shown

Function = Callable[[jax.Array], jax.Array]


def quick_gelu(x: jax.Array) -> jax.Array:
    """Computes `x * sigmoid(1.702 x)` elementwise, an approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    """Computes `max(x, 0)**2` elementwise."""
    return jnp.square(jax.nn.relu(x))


PLAIN: dict[str, Function] = {
    "gelu": jax.nn.gelu,
    "qgelu": quick_gelu,
    "relu": jax.nn.relu,
    "srelu": squared_relu,
    "silu": jax.nn.silu,
}
# Gated activations: the function is applied to the product with one kernel, and the
# result is multiplied by the product with a second kernel.
GATED: dict[str, Function] = {
    "geglu": jax.nn.gelu,
    "qgeglu": quick_gelu,
    "reglu": jax.nn.relu,
    "sreglu": squared_relu,
    "swiglu": jax.nn.silu,
}


def resolve(op: str, activation: str | Function) -> tuple[Function, bool]:
    """Looks up an activation by name; also returns whether it is a gated one.

    A gated activation applies the function to the product with one kernel, and
    multiplies the result by the product with a second kernel.

    Args:
        op: the module's name in error messages.
        activation: a name, or an elementwise function.

    Raises:
        UnknownNameError: if the name is unknown.
    """
    if callable(activation):
        return activation, False
    if isinstance(activation, str) and activation in GATED:
        return GATED[activation], True
    if isinstance(activation, str) and activation in PLAIN:
        return PLAIN[activation], False
    raise UnknownNameError(
        f"{op}: activation = {shown(activation)} is not known. "
        f"{nearest(activation, {**PLAIN, **GATED})} Or pass a function."
    )
