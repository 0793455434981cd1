"""What the operations that only communicate share."""

import dataclasses

import jax

from jax_ub import shapes
from jax_ub.ops.operation import BasicOperation
from jax_ub.primitives import varying
from jax_ub.rules.call_config import CallConfig, make_call_config


@dataclasses.dataclass(frozen=True, repr=False)
class Collective(BasicOperation):
    """Communicates an activation over `axis_name`. No parameters, no residuals."""

    axis_name: str = "tp"
    _: dataclasses.KW_ONLY
    method: str | None = None

    def saved(self, needs):
        """Nothing."""
        return frozenset()

    def call_config(self) -> CallConfig:
        """Its ranks and its method."""
        return make_call_config(self.label, self.axis_name, None, self.method)

    def check(self, x: jax.Array) -> None:
        """Checks what every collective asks of its input."""
        shapes.check_float(self.label, x=x)
        shapes.check_not_empty(self.label, "x", x)


def own(call_config: CallConfig, x: jax.Array) -> jax.Array:
    """An array that all ranks may have alike, as each rank's own."""
    return varying.promote(x, call_config.axes(x))
