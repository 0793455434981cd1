"""The gradients of a linear whose product was scaled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub.ops.basic import linear_products as products
from jax_ub.ops.basic.basic_linear import BasicLinear
from jax_ub.ops.basic.constant_scale import ConstantScale
from jax_ub.ops.fused.parts import Part, check_mode, collect
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "BackwardLinearScale"


@dataclasses.dataclass(frozen=True)
class BackwardLinearScale(FusedOperation):
    """`BasicLinear` and `ConstantScale`: both GEMMs scale what they sum.

    Transformer Engine: `BackwardLinearScale`. Saves the pass that scales dy, and its
    buffer. Not for a column-parallel linear, as there.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
    ):
        """Makes the operation of its parts, or of a tuple of them in forward order.

        Args:
            basic_ops: the parts in forward order, in the place of the keywords.
            linear: a linear that is not column parallel.
            scale: what scales its product.

        Raises:
            ShapeContractError: if a part is missing or the window is not fused.
        """
        linear, scale = collect(
            OP,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("scale", ConstantScale, scale),
        )
        check_mode(OP, linear, "column", "dx is reduced first")
        super().__init__((linear, scale))

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Two GEMMs."""
        linear, scale = self.basic_ops
        if dy is None or not needs[0]:
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = products.backward(
            linear, residuals[0], dy, needs[0], scale=scale.scale
        )
        return dx, (d_params, {}), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces linears that are scaled."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, BasicLinear, ConstantScale)
    if window is None or window[0].tensor_parallel_mode == "column":
        return None
    return BackwardLinearScale(window)
