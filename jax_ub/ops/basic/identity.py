"""The identity."""

import dataclasses

from jax_ub.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class Identity(BasicOperation):
    """Returns x unchanged.

    Transformer Engine: `te.ops.Identity`. No parameters, no residuals.
    """

    def saved(self, needs):
        """Returns no names: the backward reads no residuals."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Returns x."""
        return x, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns dy."""
        return dy, {}, ()
