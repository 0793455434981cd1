"""Fuses the backward of a linear whose input is also returned to the caller."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_ub._src.ops.basic import linear_products as products
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.make_extra_output import MakeExtraOutput, is_partial_sum
from jax_ub._src.ops.fused.parts import (
    Part,
    check_in_place,
    check_mode,
    check_userbuffers,
    collect,
)
from jax_ub._src.ops.fused.userbuffers_backward_linear import (
    OP,
    UserbuffersBackwardLinear,
    window_gradients,
)
from jax_ub._src.ops.fused.userbuffers_linear import Window, match
from jax_ub._src.ops.operation import BasicOperation, FusedOperation, Op, fuse_windows


@dataclasses.dataclass(frozen=True)
class BackwardLinearAdd(FusedOperation):
    """Adds the extra output's gradient to dx of `BasicLinear` within the dx GEMM.

    Replaces the backward of `MakeExtraOutput(in_place=True)` and the linear after it.

    The dgrad GEMM adds the gradient of the extra output and reuses its buffer for the
    sum. This saves a pass and a buffer. XLA copies the buffer first if it is still
    read. This is the case, for example, if a later operation returned the same array as
    both gradients, so that the wgrad GEMM reads it.

    Column-parallel linears are not fused, as in Transformer Engine, because their dgrad
    is reduced over the ranks before the sum. A row-parallel linear with
    `userbuffers_options` adds in its AG+GEMM, which Transformer Engine does not
    support.

    Transformer Engine: `BackwardLinearAdd`.

    Attributes:
        userbuffers: the linear as an overlapped operation, or None.
    """

    userbuffers: UserbuffersBackwardLinear | None = None

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        userbuffers: UserbuffersBackwardLinear | None = None,
        *,
        backward_add: MakeExtraOutput | None = None,
        linear: BasicLinear | None = None,
    ):
        """Takes the `MakeExtraOutput` and the linear as keywords, or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            userbuffers: the overlapped linear that `basic_ops` contains, or None.
            backward_add: the `MakeExtraOutput(in_place=True)` before the linear.
            linear: a linear that is not column parallel; a row-parallel one with
                `userbuffers_options` is overlapped.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "BackwardLinearAdd"
        window = basic_ops
        check_userbuffers(op, userbuffers, UserbuffersBackwardLinear)
        if isinstance(basic_ops, tuple | list) and userbuffers is not None:
            window = basic_ops[:2]
        backward_add, linear = collect(
            op,
            window,
            Part("backward_add", MakeExtraOutput, backward_add),
            Part("linear", BasicLinear, linear),
        )
        check_in_place(op, "backward_add", backward_add, wanted=True)
        check_mode(op, linear, "column", "dx is reduced first")
        if basic_ops is None:
            basic_ops = (backward_add, linear)
            if isinstance(match([linear]), tuple):
                userbuffers = UserbuffersBackwardLinear(linear=linear)
        super().__init__(tuple(basic_ops))
        object.__setattr__(self, "userbuffers", userbuffers)

    @property
    def overlaps(self):
        """Whether the linear's collectives run at the same time as its GEMMs."""
        return self.userbuffers is not None

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the linear's dx plus the extra output's gradient in one GEMM.

        The basic operations run separately if the sum needs a reduction first, or if
        the linear needs no gradient.
        """
        (d_extra,) = d_extra_outputs[0]
        alone = dy is None or not any(needs[1:])
        if alone or (d_extra is not None and is_partial_sum(d_extra, dy)):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        inner, saved = self.basic_ops[1:], residuals[1:]
        if not needs[0].x:
            d_extra = None
        if self.userbuffers is None:
            dx, d_linear = products.backward(
                inner[0], saved[0], dy, needs[1], residual=d_extra
            )
            d_params = (d_linear,)
        else:
            dx, d_params = window_gradients(
                OP, inner, saved, dy, needs[1:], residual=d_extra
            )
        return dx, ({}, *d_params), ((),) * len(self.basic_ops)

    @classmethod
    def refusals(cls, ops: Sequence[Op]) -> dict[int, str]:
        """Maps linears after a `MakeExtraOutput` to the reasons not to fuse them."""
        found = {i: _refusal(ops[i - 1], ops[i]) for i in range(1, len(ops))}
        return {i: reason for i, reason in found.items() if reason}

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear that an in-place `MakeExtraOutput` precedes."""
        return fuse_windows(ops, _match)


def _match(ops):
    if len(ops) < 2 or _refusal(ops[0], ops[1]) is not None:
        return None
    found = ops[1] if isinstance(ops[1], UserbuffersBackwardLinear) else None
    return BackwardLinearAdd((ops[0], *ops[1].basic_ops), found)


def _refusal(extra, linear):
    """Returns why a `MakeExtraOutput` and a linear are not fused, else None.

    The reason is empty if the operations are not a `MakeExtraOutput` and a linear.
    """
    mode: str | None = None
    if isinstance(linear, UserbuffersBackwardLinear):
        mode = Window.of(linear.basic_ops).mode
    elif isinstance(linear, BasicLinear):
        mode = linear.tensor_parallel_mode
    else:
        return ""
    if not isinstance(extra, MakeExtraOutput):
        return ""
    if not extra.in_place:
        return "MakeExtraOutput(in_place=False)"
    return "column-parallel: dx is reduced first" if mode == "column" else None
