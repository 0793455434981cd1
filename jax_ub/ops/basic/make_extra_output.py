"""The activation, handed out on the way."""

import dataclasses

import jax

from jax_ub.ops.operation import BasicOperation
from jax_ub.primitives import varying
from jax_ub.rules.fused_group import to_cotangent_aval


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
        # In a fused window dy may be each rank's part of the gradient of one x.
        return d_extra + to_cotangent_aval(d_extra, dy), {}, ()


def is_partial_sum(d_extra: jax.Array, dy: jax.Array) -> bool:
    """Whether a gradient consists of the ranks' parts, unlike that of an extra output.

    So it is where all ranks have the same activation, but go on by themselves, for
    example with a kernel of their own: the parts are summed before anything is added.

    Args:
        d_extra: gradient of the extra output, which is typed as the activation.
        dy: gradient of what was made of the activation.
    """
    return bool(varying.axes_of(dy) - varying.axes_of(d_extra))
