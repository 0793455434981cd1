"""Fuses the forward of a linear, its bias and the addition of a residual."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic.add_extra_input import AddExtraInput
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.fused import linear_windows
from jax_ub._src.ops.fused.parts import (
    Part,
    check_in_place,
    check_mode,
    check_userbuffers,
    collect,
    present,
)
from jax_ub._src.ops.fused.userbuffers_forward_linear import (
    OP,
    UserbuffersForwardLinear,
    run_window,
)
from jax_ub._src.ops.fused.userbuffers_linear import Window, match
from jax_ub._src.ops.operation import BasicOperation, FusedOperation, Op, fuse_windows


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasAdd(FusedOperation):
    """Adds bias and residual within the GEMM of a linear.

    Replaces the forward of `BasicLinear`, an optional `Bias` and
    `AddExtraInput(in_place=True)`, whose extra input is the residual.

    The GEMM adds bias and residual and writes the sum to the residual's buffer. This
    saves a pass and a buffer.

    The result of a row-parallel linear is reduced over the ranks before the sum, so it
    is not fused, as in Transformer Engine. With `userbuffers_options`, however, its
    GEMM+RS adds both, which Transformer Engine does not support.

    Transformer Engine: `ForwardLinearBiasAdd`.

    Attributes:
        userbuffers: the row-parallel linear as an overlapped operation, or None.
    """

    userbuffers: UserbuffersForwardLinear | None = None

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        userbuffers: UserbuffersForwardLinear | None = None,
        *,
        linear: BasicLinear | None = None,
        bias: Bias | None = None,
        add: AddExtraInput | None = None,
    ):
        """Takes linear, bias and residual addition as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            userbuffers: the overlapped linear that `basic_ops` contains, or None.
            linear: a linear; a row-parallel one needs `userbuffers_options`.
            bias: the bias after the linear.
            add: the `AddExtraInput(in_place=True)` after linear and bias.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "ForwardLinearBiasAdd"
        window = basic_ops
        check_userbuffers(op, userbuffers, UserbuffersForwardLinear)
        if isinstance(basic_ops, tuple | list) and userbuffers is not None:
            window = (*basic_ops[:1], *basic_ops[len(userbuffers.basic_ops) :])
        parts = collect(
            op,
            window,
            Part("linear", BasicLinear, linear),
            Part("bias", Bias, bias, is_optional=True),
            Part("add", AddExtraInput, add),
        )
        check_in_place(op, "add", parts[2], wanted=True)
        if basic_ops is None:
            basic_ops = present(*parts)
            is_row = parts[0].tensor_parallel_mode == "row"
            if is_row and isinstance(match([parts[0]]), tuple):
                userbuffers = UserbuffersForwardLinear(linear=parts[0])
        if userbuffers is None:
            check_mode(op, parts[0], "row", linear_windows.REDUCED)
        super().__init__(tuple(basic_ops))
        object.__setattr__(self, "userbuffers", userbuffers)

    @property
    def overlaps(self):
        """Whether the linear's reduce-scatter runs at the same time as its GEMM."""
        return self.userbuffers is not None

    def forward(self, params, x, extra_inputs, saves):
        """Computes `x @ kernel + bias + residual` in one GEMM or GEMM+RS.

        GEMM+RS is the overlapped GEMM and reduce-scatter of a row-parallel linear.
        """
        extras, found = extra_inputs[-1], self.userbuffers
        if found is None:
            y, residuals = self._alone(params, x, extras)
        else:
            y, residuals = self._overlapped(found.basic_ops, params, x, extras)
        num = len(self.basic_ops)
        return y, ((),) * num, (residuals, *({},) * (num - 1))

    def _alone(self, params, x, extras):
        linear, *bias, add = self.basic_ops
        rows = linear_windows.rows_of(linear, x)
        extra = linear_windows.extra_input(add, extras, x, params[0]["kernel"], rows)
        return linear_windows.forward(
            linear, (*bias, None)[0], params, x, residual=extra
        )

    def _overlapped(self, inner, params, x, extras):
        *bias, add = self.basic_ops[len(inner) :]
        call_config = Window.of(inner).call_config(OP, x.dtype)
        rows = x.shape[-2] // call_config.num_ranks if x.ndim > 1 else 1
        return run_window(
            inner,
            params,
            x,
            added=params[len(inner)]["bias"] if bias else None,
            residual=linear_windows.extra_input(
                add, extras, x, params[0]["kernel"], rows
            ),
        )

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear that an in-place `AddExtraInput` follows."""
        return fuse_windows(ops, _match)


def _match(ops):
    linear, found = ops[0], None
    if isinstance(linear, UserbuffersForwardLinear):
        window = Window.of(linear.basic_ops)
        if window.mode != "row":
            return None
        found = linear
    elif not linear_windows.is_unreduced(linear):
        return None
    # A bias before the reduce-scatter is already part of the overlapped linear.
    bias = tuple(op for op in ops[1:2] if isinstance(op, Bias))
    behind = ops[1 + len(bias) : 2 + len(bias)]
    if not behind or not isinstance(behind[0], AddExtraInput) or not behind[0].in_place:
        return None
    return ForwardLinearBiasAdd((*linear.basic_ops, *bias, behind[0]), found)
