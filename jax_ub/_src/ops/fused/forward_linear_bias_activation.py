"""Fuses the forward of a linear, its bias and an activation function."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic.activation import Activation
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.fused import linear_windows
from jax_ub._src.ops.fused.parts import Part, check_mode, collect, present
from jax_ub._src.ops.operation import BasicOperation, FusedOperation, Op, fuse_windows

OP = "ForwardLinearBiasActivation"


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasActivation(FusedOperation):
    """Adds the bias within the GEMM of a linear, then applies an optional activation.

    Replaces the forward of `BasicLinear`, `Bias` and an activation function.

    The GEMM adds the bias. This saves a separate pass, and the rounding before it. The
    activation function runs after the GEMM.

    Transformer Engine: `ForwardLinearBiasActivation`, which does not support an
    activation function yet.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        bias: Bias | None = None,
        activation: Activation | None = None,
    ):
        """Takes linear, bias and activation as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not row parallel.
            bias: the bias that the GEMM adds.
            activation: the activation function after the bias.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        parts = collect(
            OP,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("bias", Bias, bias, is_optional=True),
            Part("activation", Activation, activation, is_optional=True),
        )
        check_mode(OP, parts[0], "row", linear_windows.REDUCED)
        super().__init__(present(*parts))

    def forward(self, params, x, extra_inputs, saves):
        """Computes `activation(x @ kernel + bias)`; the GEMM adds the bias."""
        linear, *behind = self.basic_ops
        bias = behind.pop(0) if behind and isinstance(behind[0], Bias) else None
        y, residuals = linear_windows.forward(linear, bias, params, x)
        found = [residuals] if bias is None else [residuals, {}]
        if behind:
            place = len(found)
            y, _, saved = behind[0].forward(params[place], y, (), saves[place])
            found.append(saved)
        return y, ((),) * len(found), tuple(found)

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear and the bias after it by the fused operation.

        Row-parallel linears are not fused.
        """
        return fuse_windows(ops, _match)


def _match(ops):
    linear, *behind = ops[:3]
    if not linear_windows.is_unreduced(linear):
        return None
    if not behind or not isinstance(behind[0], Bias):
        return None
    window = [linear, *behind]
    if len(behind) == 1 or not isinstance(behind[1], Activation):
        window = window[:2]
    return ForwardLinearBiasActivation(tuple(window))
