"""Fuses the backward of a linear whose result is multiplied by a constant."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic import linear_products as products
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.constant_scale import ConstantScale
from jax_ub._src.ops.fused.parts import Part, check_mode, collect
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)

OP = "BackwardLinearScale"


@dataclasses.dataclass(frozen=True)
class BackwardLinearScale(FusedOperation):
    """Applies the factor of a `ConstantScale` within the linear's backward GEMMs.

    Replaces the backward of `BasicLinear` and the `ConstantScale` after it.

    This saves a pass that scales dy, and its buffer. Column-parallel linears are not
    fused, as in Transformer Engine.

    Transformer Engine: `BackwardLinearScale`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
    ):
        """Takes the linear and the scale as keywords, or both in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not column parallel.
            scale: the scale after the linear.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
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
        """Computes the gradients of x and kernel; each GEMM applies the scale."""
        linear, scale = self.basic_ops
        if dy is None or not needs[0]:
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = products.backward(
            linear, residuals[0], dy, needs[0], scale=scale.scale
        )
        return dx, (d_params, {}), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear and `ConstantScale` by the fused operation."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, BasicLinear, ConstantScale)
    if window is None or window[0].tensor_parallel_mode == "column":
        return None
    return BackwardLinearScale(window)
