"""Fuses the backward of an RMSNorm whose input is also returned to the caller."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_ub._src.ops.basic.make_extra_output import MakeExtraOutput, is_partial_sum
from jax_ub._src.ops.basic.normalization import RMSNorm
from jax_ub._src.ops.fused.parts import Part, check_in_place, collect
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "BackwardAddRMSNorm"


@dataclasses.dataclass(frozen=True)
class BackwardAddRMSNorm(FusedOperation):
    """Adds the extra output's gradient to dx of `RMSNorm` in one pass, rounded once.

    Adds the gradient of the extra output to the gradient of the norm's input in f32.
    This saves a separate pass for the sum, and the rounding before it.

    Transformer Engine: `BackwardAddRMSNorm`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        add: MakeExtraOutput | None = None,
        rmsnorm: RMSNorm | None = None,
    ):
        """Takes the `MakeExtraOutput` and the norm as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            add: the `MakeExtraOutput(in_place=False)` before the norm. Its backward
                adds the two gradients.
            rmsnorm: the norm.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
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
        """Adds the gradients of the norm and of the extra output in f32."""
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
        """Replaces each `MakeExtraOutput` and `RMSNorm` by the fused operation."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, MakeExtraOutput, RMSNorm)
    if window is None or window[0].in_place:
        return None
    return BackwardAddRMSNorm(window)
