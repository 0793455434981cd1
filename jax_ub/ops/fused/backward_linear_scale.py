"""The gradients of a linear whose product was scaled."""

import dataclasses

from jax_ub.ops.basic import linear_products as products
from jax_ub.ops.basic.basic_linear import BasicLinear
from jax_ub.ops.basic.constant_scale import ConstantScale
from jax_ub.ops.operation import FusedOperation, Op, front, fuse_windows


@dataclasses.dataclass(frozen=True)
class BackwardLinearScale(FusedOperation):
    """`BasicLinear` and `ConstantScale`: both GEMMs scale what they sum.

    Transformer Engine: `BackwardLinearScale`. Saves the pass that scales dy, and its
    buffer. Not for a column-parallel linear, as there.
    """

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
    def fuse_backward_ops(cls, ops: list[Op]) -> list[Op]:
        """Replaces linears that are scaled."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, BasicLinear, ConstantScale)
    if window is None or window[0].tensor_parallel_mode == "column":
        return None
    return BackwardLinearScale(window)
