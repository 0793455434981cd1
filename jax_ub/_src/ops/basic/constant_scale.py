"""An operation that multiplies an activation by a constant."""

import dataclasses

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class ConstantScale(BasicOperation):
    """Multiplies an activation by a constant, for example `1 / sqrt(2)`.

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
        """Returns no names, because the gradient is dy times the constant."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Multiplies x by `scale`; the result has the dtype of x."""
        shapes.check_float(self.label, x=x)
        return x * self.scale, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Multiplies dy by `scale`, which is the gradient of x."""
        return dy * self.scale, {}, ()
