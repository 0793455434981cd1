"""The gradient of an RMSNorm's input, added to that of a residual."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_ub.ops.basic.make_extra_output import MakeExtraOutput, is_partial_sum
from jax_ub.ops.basic.normalization import RMSNorm
from jax_ub.ops.fused.parts import Part, check_in_place, collect
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "BackwardAddRMSNorm"


@dataclasses.dataclass(frozen=True)
class BackwardAddRMSNorm(FusedOperation):
    """`MakeExtraOutput(in_place=False)` and `RMSNorm`: both gradients, rounded once.

    Transformer Engine: `BackwardAddRMSNorm`. Saves the pass that adds the two, and the
    rounding before it.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        add: MakeExtraOutput | None = None,
        rmsnorm: RMSNorm | None = None,
    ):
        """Makes the operation of its parts, or of a tuple of them in forward order.

        Args:
            basic_ops: the parts in forward order, in the place of the keywords.
            add: what hands the input of the norm out, not in place: its backward adds
                the two gradients.
            rmsnorm: the norm.

        Raises:
            ShapeContractError: if a part is missing or the window is not fused.
        """
        add, rmsnorm = collect(
            OP,
            basic_ops,
            Part("add", MakeExtraOutput, add),
            Part("rmsnorm", RMSNorm, rmsnorm),
        )
        check_in_place(OP, "add", add, wanted=False)
        super().__init__((add, rmsnorm))

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """The sum in f32."""
        _, norm = self.basic_ops
        (d_extra,) = d_extra_outputs[0]
        alone = dy is None or d_extra is None or not needs[1].x
        if alone or is_partial_sum(d_extra, dy):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = norm.gradients(residuals[1], dy, needs[1])
        dx = dx + d_extra.astype(jnp.float32)
        return dx.astype(d_extra.dtype), ({}, d_params), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces norms whose input was handed out."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, MakeExtraOutput, RMSNorm)
    if window is None or window[0].in_place:
        return None
    return BackwardAddRMSNorm(window)
