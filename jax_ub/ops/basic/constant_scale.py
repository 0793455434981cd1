"""`x * scale`."""

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
        """Keeps the number as Python's, which hashes and widens nothing.

        Raises:
            ShapeContractError: if it is none.
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
        """Nothing."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Scales, in the dtype of x."""
        shapes.check_float(self.label, x=x)
        return x * self.scale, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Scales dy."""
        return dy * self.scale, {}, ()
