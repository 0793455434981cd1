"""The activation, handed out on the way."""

import dataclasses

from jax_ub.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class MakeExtraOutput(BasicOperation):
    """Passes x on and hands it out as an extra output, for example as a residual.

    Transformer Engine: `te.ops.MakeExtraOutput`. No parameters, no residuals.

    Attributes:
        in_place: whether the backward may add the gradient of x to that of the extra
            output, in its buffer: lets `ops.fused.BackwardLinearAdd` write a dgrad GEMM
            there. No array of the caller's ever changes.
    """

    num_extra_outputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    def saved(self, needs):
        """Nothing."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """x, twice."""
        return x, (x,), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """The sum of what arrives on both ways."""
        (d_extra,) = d_extra_outputs
        if dy is None or d_extra is None:
            return d_extra if dy is None else dy, {}, ()
        return d_extra + dy, {}, ()
