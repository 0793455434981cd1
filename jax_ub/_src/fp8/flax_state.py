"""State of `DelayedScaling` as variables of nnx and linen modules."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core.scope import Scope
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_ub._src.errors import ConfigurationError
from jax_ub._src.fp8.recipes import DelayedScaling, Recipe
from jax_ub._src.fp8.state import init_state

# The variable type of FP8 state. nnx registers variable types by name. The name is the
# collection name of Flax's FP8 ops, because MaxText recognizes FP8 state by this name.
OverwriteWithGradient = nnx.variable_type_from_name(
    OVERWRITE_WITH_GRADIENT, allow_register=True
)
# Pickle finds a class by its module and name. nnx creates this class dynamically, so
# its attributes are set to the module and name that users import.
OverwriteWithGradient.__module__ = "jax_ub.flax"
OverwriteWithGradient.__qualname__ = "OverwriteWithGradient"
OverwriteWithGradient.__doc__ = """An nnx variable whose gradient is its new value.

The f32 arrays of `ub.fp8.init_state` are stored in such variables.

Transformer Engine: none.
"""


class Fp8State(nnx.Module):
    """The `DelayedScaling` state of an nnx layer: FP8 scales and amax histories.

    Each is a variable of type `OverwriteWithGradient`, whose gradient is its new value.
    `ub.fp8.apply_updates` stores the new values.
    """

    def __init__(self, recipe: DelayedScaling, lead: tuple[int, ...] = ()):
        """Creates a layer's initial state: scales of 1, and amax histories of zeros.

        If the arrays of several layers are stacked, `lead` has the sizes of the leading
        dimensions, which index the layers.
        """
        for name, array in init_state(recipe).items():
            stacked = jnp.broadcast_to(array, (*lead, *array.shape))
            setattr(self, name, OverwriteWithGradient(stacked))

    def arrays(self) -> dict[str, jax.Array]:
        """Returns a dict of scales and histories, keyed as in `ub.fp8.init_state`."""
        return {
            name: variable[...]
            for name, variable in vars(self).items()
            if isinstance(variable, OverwriteWithGradient)
        }


def linen_state(op: str, module: nn.Module, recipe: Recipe | None) -> Any:
    """Returns the `DelayedScaling` state of a linen module, which `init` creates.

    It is in the collection "_overwrite_with_gradient". The result is None if the recipe
    has no state.

    Raises:
        ConfigurationError: if the collection does not have the state.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    state, scope = init_state(recipe), cast(Scope, module.scope)
    is_mutable = scope.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
    for name in state:
        if not is_mutable and not scope.has_variable(OVERWRITE_WITH_GRADIENT, name):
            raise ConfigurationError(
                f"{op}: fp8 = DelayedScaling(...), but the variables have no {name} in "
                f'the collection "{OVERWRITE_WITH_GRADIENT}". Initialize the model '
                "with this recipe; in nn.scan, add the collection to variable_axes."
            )
    return {
        name: scope.variable(OVERWRITE_WITH_GRADIENT, name, lambda x=x: x).value
        for name, x in state.items()
    }
