"""The gradients of an activation and of the bias before it, together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub.ops.basic.activation import Activation
from jax_ub.ops.basic.bias import Bias
from jax_ub.ops.fused.parts import Part, collect
from jax_ub.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)
from jax_ub.rules.bias import row_sum


@dataclasses.dataclass(frozen=True)
class BackwardActivationBias(FusedOperation):
    """`Bias` and an activation: the bias gradient is summed before anything is rounded.

    Transformer Engine: `BackwardActivationBias`, which does so where it quantizes.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        bias: Bias | None = None,
        activation: Activation | None = None,
    ):
        """Makes the operation of its parts, or of a tuple of them in forward order.

        Args:
            basic_ops: the parts in forward order, in the place of the keywords.
            bias: the bias before the activation.
            activation: the activation.

        Raises:
            ShapeContractError: if a part is missing or the window is not fused.
        """
        bias, activation = collect(
            "BackwardActivationBias",
            basic_ops,
            Part("bias", Bias, bias),
            Part("activation", Activation, activation),
        )
        super().__init__((bias, activation))

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """One derivative, for both."""
        _, activation = self.basic_ops
        if dy is None or not needs[1].x:
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx = activation.gradient(residuals[1]["x"], dy)
        d_params = {"bias": row_sum(dx)} if needs[0].params else {}
        return dx.astype(dy.dtype), (d_params, {}), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces activations with the bias before them."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, Bias, Activation)
    return None if window is None else BackwardActivationBias(window)
