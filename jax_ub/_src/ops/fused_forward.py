"""Fused operations: linears whose GEMM adds a bias or a residual in the forward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jax_ub._src.ops.activations import Activation
from jax_ub._src.ops.basic import AddExtraInput, Bias, ConstantScale
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
    present,
)
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.operation import BasicOperation, Extras, compute_dtype
from jax_ub._src.ops.userbuffers import UserbuffersForwardLinear, match
from jax_ub._src.parallel import ROW

_IS_REDUCED = "its result is reduced before anything is added"


def _adds_in_gemm(op: Op) -> bool:
    """Returns whether `op` is a linear whose GEMM can also add a bias or residual.

    The result of a row-parallel linear is reduced over the ranks before the sum.
    """
    return isinstance(op, BasicLinear) and op.tensor_parallel_mode != ROW


def _residual(
    add: AddExtraInput, extras: Extras, linear: BasicLinear, x, kernel
) -> jax.Array:
    """Returns the extra input that `linear` adds in its GEMM, checking its shape."""
    (extra,) = extras
    assert extra is not None
    leading = x.shape[:-1]
    if linear.mode.op == "all_gather_matmul":
        config = linear.call_config(compute_dtype(linear.dtype, x))
        leading = (*x.shape[:-2], x.shape[-2] * config.num_ranks)
    add.check((*leading, kernel.shape[1]), extra)
    return extra


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasAdd(FusedOperation):
    """Computes `x @ kernel + bias + residual` in one GEMM that overwrites the residual.

    Replaces the forward of `BasicLinear`, an optional `Bias` and
    `AddExtraInput(in_place=True)`, whose extra input is the residual.

    The GEMM adds bias and residual and writes the sum to the residual's buffer. This
    saves a pass and a buffer.

    The result of a row-parallel linear is reduced over the ranks before the sum, so it
    is not fused, as in Transformer Engine. With `userbuffers_options`, however, its
    GEMM+RS adds both, which Transformer Engine does not support.

    Transformer Engine: `ForwardLinearBiasAdd`.

    Attributes:
        userbuffers: the operation that computes an overlapped linear, or None.
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
        """Takes a linear, a `Bias` and an `AddExtraInput`, as keywords or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            userbuffers: the overlapped linear with which `basic_ops` begin, or None.
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
            if parts[0].tensor_parallel_mode == ROW and match(basic_ops[:1])[0]:
                userbuffers = UserbuffersForwardLinear(linear=parts[0])
        if userbuffers is None:
            check_mode(op, parts[0], ROW, _IS_REDUCED)
        super().__init__(tuple(basic_ops))
        object.__setattr__(self, "userbuffers", userbuffers)

    @property
    def overlaps(self):
        return self.userbuffers is not None

    def forward(self, params, x, extra_inputs, saves):
        """Computes `x @ kernel + bias + residual` in one GEMM or GEMM+RS."""
        linear, add = self.basic_ops[0], self.basic_ops[-1]
        kernel, overlapped = params[0]["kernel"], self.userbuffers
        num_inner = 1 if overlapped is None else len(overlapped.basic_ops)
        bias, out_dtype = _leading_bias(self.basic_ops[num_inner:], params[num_inner:])
        if overlapped is None:
            residual = _residual(add, extra_inputs[-1], linear, x, kernel)
            addends = {"bias": bias, "residual": residual, "out_dtype": out_dtype}
            y, _, own = linear.forward(params[0], x, (), saves[0], **addends)
            residuals = (own,)
        else:
            dtype = compute_dtype(linear.dtype, x)
            num_ranks = overlapped.call_config(dtype).num_ranks
            rows = x.shape[-2] // num_ranks if x.ndim > 1 else 1
            (residual,) = extra_inputs[-1]
            add.check((*x.shape[:-2], rows, kernel.shape[1]), residual)
            y, _, residuals = overlapped.forward(
                params[:num_inner],
                x,
                extra_inputs[:num_inner],
                saves[:num_inner],
                added_bias=bias,
                residual=residual,
                out_dtype=out_dtype,
            )
        num = len(self.basic_ops)
        return y, ((),) * num, (*residuals, *({},) * (num - num_inner))

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each linear with the `Bias` and in-place `AddExtraInput` after it."""

        def fused(rest):
            linear = rest[0]
            is_overlapped = isinstance(linear, UserbuffersForwardLinear)
            adds = linear.mode == ROW if is_overlapped else _adds_in_gemm(linear)
            if not adds:
                return None
            # A `UserbuffersForwardLinear` already contains the bias before its
            # reduce-scatter. The bias that is taken here comes after it.
            window = [linear, *(op for op in rest[1:2] if isinstance(op, Bias))]
            add = next(iter(rest[len(window) :]), None)
            if not isinstance(add, AddExtraInput) or not add.in_place:
                return None
            basic_ops = (*linear.basic_ops, *window[1:], add)
            return ForwardLinearBiasAdd(basic_ops, linear if is_overlapped else None)

        return fuse_windows(ops, fused)


def _leading_bias(ops, params):
    """Returns (bias, result dtype) if `ops` begins with a `Bias`, else (None, None)."""
    if not match_prefix(ops, Bias):
        return None, None
    return params[0]["bias"], ops[0].dtype


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasActivation(FusedOperation):
    """Computes `activation(x @ kernel + bias)`, where the GEMM adds the bias.

    Replaces the forward of `BasicLinear`, `Bias` and an activation function. This saves
    a separate pass for the bias, and the rounding before it. The activation function
    runs after the GEMM.

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
        """Takes a linear, a `Bias` and an activation, as keywords or in a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not row parallel.
            bias: the bias that the GEMM adds.
            activation: the activation function after the bias.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "ForwardLinearBiasActivation"
        parts = collect(
            op,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("bias", Bias, bias, is_optional=True),
            Part("activation", Activation, activation, is_optional=True),
        )
        check_mode(op, parts[0], ROW, _IS_REDUCED)
        super().__init__(present(*parts))

    def forward(self, params, x, extra_inputs, saves):
        """Computes `activation(x @ kernel + bias)`; the GEMM adds the bias."""
        linear, *rest = self.basic_ops
        bias, out_dtype = _leading_bias(rest, params[1:])
        addends = {"bias": bias, "out_dtype": out_dtype}
        y, _, saved = linear.forward(params[0], x, (), saves[0], **addends)
        residuals = [saved]
        for i, op in enumerate(rest, 1):
            saved = {}
            if isinstance(op, Activation):
                y, _, saved = op.forward(params[i], y, (), saves[i])
            residuals.append(saved)
        return y, ((),) * len(residuals), tuple(residuals)

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each linear with the `Bias` and the activation after it."""

        def fused(rest):
            if not _adds_in_gemm(rest[0]) or not match_prefix(rest[1:], Bias):
                return None
            size = 3 if match_prefix(rest[2:], Activation) else 2
            return ForwardLinearBiasActivation(tuple(rest[:size]))

        return fuse_windows(ops, fused)


@dataclasses.dataclass(frozen=True)
class ForwardLinearScaleAdd(FusedOperation):
    """Computes `scale * x @ kernel + residual` in one GEMM, in the residual's buffer.

    Replaces the forward of `BasicLinear`, `ConstantScale` and
    `AddExtraInput(in_place=True)`, whose extra input is the residual.

    The GEMM scales its result, adds the residual and writes the sum to the residual's
    buffer. This saves two passes and a buffer. Row-parallel linears are not fused,
    because their result is reduced over the ranks before the sum.

    Transformer Engine: `ForwardLinearScaleAdd`.
    """

    def __init__(
        self,
        basic_ops: Sequence[BasicOperation] | None = None,
        *,
        linear: BasicLinear | None = None,
        scale: ConstantScale | None = None,
        add: AddExtraInput | None = None,
    ):
        """Takes a linear, a `ConstantScale` and an `AddExtraInput`, or a tuple.

        Args:
            basic_ops: the operations in forward order, instead of the keywords.
            linear: a linear that is not row parallel.
            scale: the scale after the linear.
            add: the `AddExtraInput(in_place=True)` after the scale.

        Raises:
            ShapeContractError: if an operation is missing or not supported here.
        """
        op = "ForwardLinearScaleAdd"
        parts = collect(
            op,
            basic_ops,
            Part("linear", BasicLinear, linear),
            Part("scale", ConstantScale, scale),
            Part("add", AddExtraInput, add),
        )
        check_mode(op, parts[0], ROW, _IS_REDUCED)
        check_in_place(op, "add", parts[2], wanted=True)
        super().__init__(parts)

    def forward(self, params, x, extra_inputs, saves):
        """Computes `scale * x @ kernel + residual` in one GEMM."""
        linear, scale, add = self.basic_ops
        residual = _residual(add, extra_inputs[2], linear, x, params[0]["kernel"])
        y, _, residuals = linear.forward(
            params[0], x, (), saves[0], residual=residual, scale=scale.scale
        )
        return y, ((), (), ()), (residuals, {}, {})

    @classmethod
    def fuse_forward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Fuses each linear with the scale and in-place addition after it."""

        def fused(rest):
            window = match_prefix(rest, BasicLinear, ConstantScale, AddExtraInput)
            if window is None or not _adds_in_gemm(window[0]) or not window[2].in_place:
                return None
            return ForwardLinearScaleAdd(window)

        return fuse_windows(ops, fused)
