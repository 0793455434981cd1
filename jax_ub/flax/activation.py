"""Activations of an MLP, by the names that Transformer Engine gives them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ub.errors import UnknownNameError, nearest, shown

Function = Callable[[jax.Array], jax.Array]


def quick_gelu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(1.702 x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    """`max(x, 0)` squared."""
    return jnp.square(jax.nn.relu(x))


PLAIN: dict[str, Function] = {
    "gelu": jax.nn.gelu,
    "qgelu": quick_gelu,
    "relu": jax.nn.relu,
    "srelu": squared_relu,
    "silu": jax.nn.silu,
}
# The function of the gate, which is multiplied by what another kernel makes.
GATED: dict[str, Function] = {
    "geglu": jax.nn.gelu,
    "qgeglu": quick_gelu,
    "reglu": jax.nn.relu,
    "sreglu": squared_relu,
    "swiglu": jax.nn.silu,
}


def resolve(op: str, activation: str | Function) -> tuple[Function, bool]:
    """Finds an activation: a function, and whether it is that of a gate.

    Args:
        op: the module's name in errors.
        activation: a name, or a function of each element.

    Raises:
        UnknownNameError: if there is none of that name.
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
