"""Base class of the operations that only communicate."""

import dataclasses

import jax

from jax_ub import shapes
from jax_ub.ops.operation import BasicOperation
from jax_ub.primitives import varying
from jax_ub.rules.call_config import CallConfig, make_call_config


@dataclasses.dataclass(frozen=True, repr=False)
class Collective(BasicOperation):
    """A collective over `axis_name`, without parameters or residuals."""

    axis_name: str = "tp"
    _: dataclasses.KW_ONLY
    method: str | None = None

    def saved(self, needs):
        """Returns no names: the backward reads no residuals."""
        return frozenset()

    def call_config(self) -> CallConfig:
        """Returns the call configuration: the ranks and the method."""
        return make_call_config(self.label, self.axis_name, None, self.method)

    def check(self, x: jax.Array) -> None:
        """Checks that x is a non-empty float array."""
        shapes.check_float(self.label, x=x)
        shapes.check_not_empty(self.label, "x", x)


def own(call_config: CallConfig, x: jax.Array) -> jax.Array:
    """Types x as varying over the call's mesh axis.

    It promotes an array that `shard_map` types as replicated.
    """
    return varying.promote(x, call_config.axes(x))
