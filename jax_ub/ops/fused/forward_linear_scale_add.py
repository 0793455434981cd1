"""A linear whose product is scaled and added to a residual, in one GEMM."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub.ops.basic.add_extra_input import AddExtraInput
from jax_ub.ops.basic.basic_linear import BasicLinear
from jax_ub.ops.basic.constant_scale import ConstantScale
from jax_ub.ops.fused import linear_windows
from jax_ub.ops.fused.parts import Part, check_in_place, check_mode, collect
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "ForwardLinearScaleAdd"


@dataclasses.dataclass(frozen=True)
class ForwardLinearScaleAdd(FusedOperation):
    """`BasicLinear`, `ConstantScale` and `AddExtraInput(in_place=True)`.

    Transformer Engine: `ForwardLinearScaleAdd`. Saves two passes over the product, and
    its buffer: it is written where the residual was. Not for a row-parallel linear,
    which is reduced first.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
        add: AddExtraInput | None = None,
    ):
        """Makes the operation of its parts, or of a tuple of them in forward order.

        Args:
            basic_ops: the parts in forward order, in the place of the keywords.
            linear: a linear that is not row parallel.
            scale: what scales its product.
            add: what is added to that, in place.

        Raises:
            ShapeContractError: if a part is missing or the window is not fused.
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
        """One GEMM."""
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
        """Replaces linears that are scaled and added to something in place."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, BasicLinear, ConstantScale, AddExtraInput)
    if window is None or not linear_windows.is_unreduced(window[0]):
        return None
    return ForwardLinearScaleAdd(window) if window[2].in_place else None
