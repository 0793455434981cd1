"""Multiplication by a constant."""

import dataclasses

from jax_ub import shapes
from jax_ub.errors import ShapeContractError, shown
from jax_ub.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class ConstantScale(BasicOperation):
    """Multiplies by a constant.

    Transformer Engine: `te.ops.ConstantScale`. No parameters, no residuals.

    Attributes:
        scale: a Python number.
    """

    scale: float

    def __post_init__(self):
        """Converts `scale` to a Python float.

        A Python float is hashable and does not promote the dtype of x.

        Raises:
            ShapeContractError: if `scale` is not a number.
        """
        if not shapes.is_number(self.scale):
            raise ShapeContractError(
                f"{self.label}: scale = {shown(self.scale)} is of type "
                f"{type(self.scale).__name__}, not a number that is known before "
                "anything runs. Pass a Python number, for example float(scale)."
            )
        object.__setattr__(self, "scale", float(self.scale))
        super().__post_init__()

    def saved(self, needs):
        """Returns no names: the backward reads no residuals."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Multiplies x by `scale`, in the dtype of x."""
        shapes.check_float(self.label, x=x)
        return x * self.scale, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Multiplies dy by `scale`."""
        return dy * self.scale, {}, ()
