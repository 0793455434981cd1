"""Base class of the operations that only communicate."""

import dataclasses

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import varying
from jax_ub._src.rules.call_config import CallConfig, make_call_config


@dataclasses.dataclass(frozen=True, repr=False)
class Collective(BasicOperation):
    """Base class of operations that only communicate, such as `AllGather`.

    They have no parameters and no residuals. The ranks are those of the mesh axes
    `axis_name`.
    """

    axis_name: str = "tp"
    _: dataclasses.KW_ONLY
    method: str | None = None

    def saved(self, needs):
        """Returns no names, because the gradients do not depend on the inputs."""
        return frozenset()

    def call_config(self) -> CallConfig:
        """Returns the ranks and the method with which the collective runs."""
        return make_call_config(self.label, self.axis_name, None, self.method)

    def check(self, x: jax.Array) -> None:
        """Checks that x is a float array with at least one element."""
        shapes.check_float(self.label, x=x)
        shapes.check_not_empty(self.label, "x", x)


def own(call_config: CallConfig, x: jax.Array) -> jax.Array:
    """Gives x the type "varying over the collective's mesh axis" in `shard_map`.

    It promotes an array that `shard_map` types as replicated.
    """
    return varying.promote(x, call_config.axes(x))
