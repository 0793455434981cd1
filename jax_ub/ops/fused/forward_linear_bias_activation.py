"""A linear with its bias in the GEMM, and the activation behind them."""

import dataclasses

from jax_ub.ops.basic.activation import Activation
from jax_ub.ops.basic.bias import Bias
from jax_ub.ops.fused import linear_windows
from jax_ub.ops.operation import FusedOperation, Op, fuse_windows


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasActivation(FusedOperation):
    """`BasicLinear`, `Bias`, and an activation where there is one.

    Transformer Engine: `ForwardLinearBiasActivation`, which has no activation yet.
    Saves the pass that adds the bias, and the rounding before it.
    """

    def forward(self, params, x, extra_inputs, saves):
        """One GEMM; then the activation."""
        linear, bias, *activation = self.basic_ops
        y, residuals = linear_windows.forward(linear, bias, params, x)
        if not activation:
            return y, ((), ()), (residuals, {})
        y, _, saved = activation[0].forward(params[2], y, (), saves[2])
        return y, ((), (), ()), (residuals, {}, saved)

    @classmethod
    def fuse_forward_ops(cls, ops: list[Op]) -> list[Op]:
        """Replaces linears that reduce nothing, with their bias."""
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
