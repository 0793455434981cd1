"""Fuses the backward of an activation function and of the bias before it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic.activation import Activation
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.fused.parts import Part, collect
from jax_ub._src.ops.operation import (
    BasicOperation,
    FusedOperation,
    Op,
    front,
    fuse_windows,
)
from jax_ub._src.rules.bias import row_sum


@dataclasses.dataclass(frozen=True)
class BackwardActivationBias(FusedOperation):
    """Computes the gradients of `Bias` and the activation after it together.

    The bias gradient is summed from the f32 gradient, before it is rounded.

    Transformer Engine: `BackwardActivationBias`, which fuses only if it quantizes.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        bias: Bias | None = None,
        activation: Activation | None = None,
    ):
        """Takes the bias and the activation as keywords, or both in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            bias: the bias before the activation function.
            activation: the activation function.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        bias, activation = collect(
            "BackwardActivationBias",
            basic_ops,
            Part("bias", Bias, bias),
            Part("activation", Activation, activation),
        )
        super().__init__((bias, activation))

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes dx and the bias gradient from one f32 array; rounds each once."""
        _, activation = self.basic_ops
        if dy is None or not needs[1].x:
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx = activation.gradient(residuals[1]["x"], dy)
        d_params = {"bias": row_sum(dx)} if needs[0].params else {}
        return dx.astype(dy.dtype), (d_params, {}), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each `Bias` that an activation follows by the fused operation."""
        return fuse_windows(ops, _match)


def _match(ops):
    window = front(ops, Bias, Activation)
    return None if window is None else BackwardActivationBias(window)
