"""An operation that does nothing."""

import dataclasses

from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class Identity(BasicOperation):
    """Returns its input unchanged.

    Transformer Engine: `te.ops.Identity`. No parameters, no residuals.
    """

    def saved(self, needs):
        """Returns no names, because the gradient of x is dy."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Returns x unchanged."""
        return x, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns dy as the gradient of x."""
        return dy, {}, ()
