"""The gradient of an RMSNorm's input, added to that of a residual."""

import dataclasses

import jax.numpy as jnp

from jax_ub.ops.basic.make_extra_output import MakeExtraOutput, has_parts
from jax_ub.ops.basic.normalization import RMSNorm
from jax_ub.ops.operation import FusedOperation, Op, front, fuse_windows


@dataclasses.dataclass(frozen=True)
class BackwardAddRMSNorm(FusedOperation):
    """`MakeExtraOutput(in_place=False)` and `RMSNorm`: both gradients, rounded once.

    Transformer Engine: `BackwardAddRMSNorm`. Saves the pass that adds the two, and the
    rounding before it.
    """

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """The sum in f32."""
        _, norm = self.basic_ops
        (d_extra,) = d_extra_outputs[0]
        alone = dy is None or d_extra is None or not needs[1].x
        if alone or has_parts(d_extra, dy):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = norm.gradients(residuals[1], dy, needs[1])
        dx = dx + d_extra.astype(jnp.float32)
        return dx.astype(d_extra.dtype), ({}, d_params), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: list[Op]) -> list[Op]:
        """Replaces norms whose input was handed out."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, MakeExtraOutput, RMSNorm)
    if window is None or window[0].in_place:
        return None
    return BackwardAddRMSNorm(window)
