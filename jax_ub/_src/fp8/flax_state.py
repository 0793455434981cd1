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

# nnx registers the type of a variable by name. MaxText recognizes FP8 state by this
# name.
OverwriteWithGradient = nnx.variable_type_from_name(
    OVERWRITE_WITH_GRADIENT, allow_register=True
)
# nnx creates the class dynamically. Pickle needs to find it by these names.
OverwriteWithGradient.__module__ = "jax_ub.flax"
OverwriteWithGradient.__qualname__ = "OverwriteWithGradient"
OverwriteWithGradient.__doc__ = """An nnx variable whose gradient is its new value.

The f32 arrays of `ub.fp8.init_state` are stored in such variables.

Transformer Engine: none.
"""


class Fp8State(nnx.Module):
    """The state of `DelayedScaling` in a layer: scales and amax histories.

    Each is a variable of type `OverwriteWithGradient`, whose gradient is its new value.
    `ub.fp8.apply_updates` stores the new values.
    """

    def __init__(self, recipe: DelayedScaling, lead: tuple[int, ...] = ()):
        """Creates the initial scales and amax histories of a layer.

        If the arrays of several layers are stacked, `lead` has the sizes of the leading
        dimensions, which index the layers.
        """
        for name, array in init_state(recipe).items():
            stacked = jnp.broadcast_to(array, (*lead, *array.shape))
            setattr(self, name, OverwriteWithGradient(stacked))

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the scales and amax histories as a dict, like `ub.fp8.init_state`."""
        return {
            name: variable[...]
            for name, variable in vars(self).items()
            if isinstance(variable, OverwriteWithGradient)
        }


def linen_state(op: str, module: nn.Module, recipe: Recipe | None) -> Any:
    """Returns the FP8 state of a linen module, which `module.init` creates.

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
