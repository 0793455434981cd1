"""Fuses the forward of a linear, a scale and the addition of a residual."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic.add_extra_input import AddExtraInput
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.constant_scale import ConstantScale
from jax_ub._src.ops.fused import linear_windows
from jax_ub._src.ops.fused.parts import Part, check_in_place, check_mode, collect
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "ForwardLinearScaleAdd"


@dataclasses.dataclass(frozen=True)
class ForwardLinearScaleAdd(FusedOperation):
    """Scales the product and adds a residual within the GEMM of a linear.

    Replaces the forward of `BasicLinear`, `ConstantScale` and
    `AddExtraInput(in_place=True)`, whose extra input is the residual.

    The GEMM scales its result, adds the residual and writes the sum to the residual's
    buffer. This saves two passes and a buffer. Row-parallel linears are not fused,
    because their result is reduced over the ranks before the sum.

    Transformer Engine: `ForwardLinearScaleAdd`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
        add: AddExtraInput | None = None,
    ):
        """Takes linear, scale and residual addition as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not row parallel.
            scale: the scale after the linear.
            add: the `AddExtraInput(in_place=True)` after the scale.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        linear, scale, add = collect(
            OP,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("scale", ConstantScale, scale),
            Part("add", AddExtraInput, add),
        )
        check_mode(OP, linear, "row", linear_windows.REDUCED)
        check_in_place(OP, "add", add, wanted=True)
        super().__init__((linear, scale, add))

    def forward(self, params, x, extra_inputs, saves):
        """Computes `scale * x @ kernel + residual` in one GEMM."""
        linear, scale, add = self.basic_ops
        rows = linear_windows.rows_of(linear, x)
        extra = linear_windows.extra_input(
            add, extra_inputs[2], x, params[0]["kernel"], rows
        )
        y, residuals = linear_windows.forward(
            linear, None, params, x, residual=extra, scale=scale.scale
        )
        return y, ((), (), ()), (residuals, {}, {})

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear, scale and in-place addition by the fused operation."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, BasicLinear, ConstantScale, AddExtraInput)
    if window is None or not linear_windows.is_unreduced(window[0]):
        return None
    return ForwardLinearScaleAdd(window) if window[2].in_place else None
