"""An operation that returns an inner activation to the caller."""

import dataclasses

import jax

from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import varying
from jax_ub._src.rules.fused_group import to_cotangent_aval


@dataclasses.dataclass(frozen=True, repr=False)
class MakeExtraOutput(BasicOperation):
    """Passes x on and also returns it as an extra output, for example as a residual.

    Transformer Engine: `te.ops.MakeExtraOutput`. No parameters, no residuals.

    Attributes:
        in_place: whether the backward may reuse the buffer of the extra output's
            gradient for the sum of both gradients. If True,
            `ops.fused.BackwardLinearAdd` adds that gradient in the dgrad GEMM. The
            caller's arrays never change.
    """

    num_extra_outputs = 1

    _: dataclasses.KW_ONLY
    in_place: bool = False

    def saved(self, needs):
        """Returns no names, because the gradient depends only on the cotangents."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Returns x twice: as the activation and as the extra output."""
        return x, (x,), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns dx, the sum of the cotangents of y and of the extra output."""
        (d_extra,) = d_extra_outputs
        if dy is None or d_extra is None:
            return d_extra if dy is None else dy, {}, ()
        # In a fused window, dy may be a partial gradient of a replicated x, so it is
        # summed over the ranks.
        return d_extra + to_cotangent_aval(d_extra, dy), {}, ()


def is_partial_sum(d_extra: jax.Array, dy: jax.Array) -> bool:
    """Returns whether dy is a partial sum over ranks while `d_extra` is complete.

    This is the case if x is replicated but the ranks compute different functions of it,
    for example with their own shards of a kernel. Such a dy must be summed over the
    ranks before `d_extra` is added.

    Args:
        d_extra: gradient of the extra output; varies over the same axes as x.
        dy: gradient of the result.
    """
    return bool(varying.axes_of(dy) - varying.axes_of(d_extra))
