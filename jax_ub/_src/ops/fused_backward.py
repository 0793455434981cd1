"""Fused operations of the backward: sums and scales within another computation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_ub._src.ops.activations import Activation
from jax_ub._src.ops.basic import Bias, ConstantScale, MakeExtraOutput, is_partial_sum
from jax_ub._src.ops.fused_operation import (
    FusedOperation,
    Op,
    Part,
    check_in_place,
    check_mode,
    check_userbuffers,
    collect,
    fuse_windows,
    match_prefix,
)
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.normalization import RMSNorm
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.ops.userbuffers import match
from jax_ub._src.ops.userbuffers_backward import UserbuffersBackwardLinear
from jax_ub._src.parallel import COLUMN
from jax_ub._src.rules.vjp import row_sum


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
        userbuffers: the operation that computes overlapped gradients, or None.
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
        """Takes a `MakeExtraOutput` and a linear as keywords, or both in one tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            userbuffers: the overlapped linear whose operations follow in `basic_ops`,
                or None.
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
        check_mode(op, linear, COLUMN, "dx is reduced first")
        if basic_ops is None:
            basic_ops = (backward_add, linear)
            if match([linear])[0]:
                userbuffers = UserbuffersBackwardLinear(linear=linear)
        super().__init__(tuple(basic_ops))
        object.__setattr__(self, "userbuffers", userbuffers)

    @property
    def overlaps(self):
        return self.userbuffers is not None

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the linear's dx plus the extra output's gradient in one GEMM.

        The basic operations run separately if the sum needs a reduction first, or if
        the linear needs no gradient.
        """
        (d_extra,) = d_extra_outputs[0]
        is_unfused = dy is None or not any(needs[1:])
        if is_unfused or (d_extra is not None and is_partial_sum(d_extra, dy)):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        if not needs[0].x:
            d_extra = None
        if self.userbuffers is None:
            dx, d_linear, _ = self.basic_ops[1].backward(
                residuals[1], dy, (), needs[1], residual=d_extra
            )
            d_params = (d_linear,)
        else:
            dx, d_params, _ = self.userbuffers.backward(
                residuals[1:], dy, d_extra_outputs[1:], needs[1:], residual=d_extra
            )
        return dx, ({}, *d_params), ((),) * len(self.basic_ops)

    @classmethod
    def unfused_reasons(cls, ops: Sequence[Op]) -> dict[int, str]:
        pairs = zip(ops, ops[1:], strict=False)
        reasons = {i: _match_add(*pair)[1] for i, pair in enumerate(pairs, 1)}
        return {i: reason for i, reason in reasons.items() if reason}

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each in-place `MakeExtraOutput` with the linear that follows it."""

        def fused(rest):
            if len(rest) < 2 or not _match_add(*rest[:2])[0]:
                return None
            extra, linear = rest[:2]
            is_overlapped = isinstance(linear, UserbuffersBackwardLinear)
            userbuffers = linear if is_overlapped else None
            return BackwardLinearAdd((extra, *linear.basic_ops), userbuffers)

        return fuse_windows(ops, fused)


def _match_add(extra: Op, linear: Op) -> tuple[bool, str]:
    """Returns whether `extra` and `linear` can be fused, and else the reason."""
    if isinstance(linear, UserbuffersBackwardLinear):
        mode: str | None = linear.mode
    elif isinstance(linear, BasicLinear):
        mode = linear.tensor_parallel_mode
    else:
        return False, ""
    if not isinstance(extra, MakeExtraOutput):
        return False, ""
    if not extra.in_place:
        return False, "MakeExtraOutput(in_place=False)"
    if mode == COLUMN:
        return False, "column-parallel: dx is reduced first"
    return True, ""


@dataclasses.dataclass(frozen=True)
class BackwardLinearScale(FusedOperation):
    """Applies the `ConstantScale` after a linear in the linear's gradient GEMMs.

    Replaces the backward of `BasicLinear` and the `ConstantScale` after it. This saves
    a pass that scales dy, and its buffer. Column-parallel linears are not fused, as in
    Transformer Engine.

    Transformer Engine: `BackwardLinearScale`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
    ):
        """Takes a linear and a `ConstantScale` as keywords, or both in one tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not column parallel.
            scale: the scale after the linear.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "BackwardLinearScale"
        parts = collect(
            op,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("scale", ConstantScale, scale),
        )
        check_mode(op, parts[0], COLUMN, "dx is reduced first")
        super().__init__(parts)

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the gradients of x and kernel; each GEMM multiplies by `scale`."""
        linear, scale = self.basic_ops
        if dy is None or not needs[0]:
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params, _ = linear.backward(
            residuals[0], dy, (), needs[0], scale=scale.scale
        )
        return dx, (d_params, {}), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each linear with the `ConstantScale` that follows it."""

        def fused(rest):
            window = match_prefix(rest, BasicLinear, ConstantScale)
            if window is None or window[0].tensor_parallel_mode == COLUMN:
                return None
            return BackwardLinearScale(window)

        return fuse_windows(ops, fused)


@dataclasses.dataclass(frozen=True)
class BackwardActivationBias(FusedOperation):
    """Computes the gradients of a `Bias` and of the activation after it in one pass.

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
        """Takes a `Bias` and an activation as keywords, or both in one tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            bias: the bias before the activation function.
            activation: the activation function.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        parts = collect(
            "BackwardActivationBias",
            basic_ops,
            Part("bias", Bias, bias),
            Part("activation", Activation, activation),
        )
        super().__init__(parts)

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
        """Fuses each `Bias` with the activation that follows it."""

        def fused(rest):
            window = match_prefix(rest, Bias, Activation)
            return None if window is None else BackwardActivationBias(window)

        return fuse_windows(ops, fused)


@dataclasses.dataclass(frozen=True)
class BackwardAddRMSNorm(FusedOperation):
    """Adds the extra output's gradient to dx of `RMSNorm` in one pass, rounded once.

    Adds the gradient of the extra output to the gradient of the norm's input in f32.
    This saves a separate pass for the sum, and the rounding before it.

    Transformer Engine: `BackwardAddRMSNorm`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        add: MakeExtraOutput | None = None,
        rmsnorm: RMSNorm | None = None,
    ):
        """Takes a `MakeExtraOutput` and an `RMSNorm` as keywords, or in one tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            add: the `MakeExtraOutput(in_place=False)` before the norm. Its backward
                adds the two gradients.
            rmsnorm: the norm.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "BackwardAddRMSNorm"
        parts = collect(
            op,
            basic_ops,
            Part("add", MakeExtraOutput, add),
            Part("rmsnorm", RMSNorm, rmsnorm),
        )
        check_in_place(op, "add", parts[0], wanted=False)
        super().__init__(parts)

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the norm's dx plus the extra output's gradient in f32."""
        _, norm = self.basic_ops
        (d_extra,) = d_extra_outputs[0]
        is_unfused = dy is None or d_extra is None or not needs[1].x
        if is_unfused or is_partial_sum(d_extra, dy):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = norm.gradients(residuals[1], dy, needs[1])
        dx = dx + d_extra.astype(jnp.float32)
        return dx.astype(d_extra.dtype), ({}, d_params), ((), ())

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each `MakeExtraOutput` with the `RMSNorm` that follows it."""

        def fused(rest):
            window = match_prefix(rest, MakeExtraOutput, RMSNorm)
            if window is None or window[0].in_place:
                return None
            return BackwardAddRMSNorm(window)

        return fuse_windows(ops, fused)
