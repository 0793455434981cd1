"""Fused operations that add or scale within a GEMM, an activation or a norm."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_ub._src.errors import shown
from jax_ub._src.ops.basic import (
    AddExtraInput,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    is_partial_sum,
)
from jax_ub._src.ops.fused_operation import (
    BackwardPattern,
    ForwardPattern,
    FusedPattern,
    Op,
    pattern_field,
)
from jax_ub._src.ops.linear import BasicLinear
from jax_ub._src.ops.nonlinear import Activation, RMSNorm
from jax_ub._src.ops.operation import compute_dtype
from jax_ub._src.ops.userbuffers import (
    UserbuffersForwardLinear,
    UserbuffersLinear,
    match,
)
from jax_ub._src.ops.userbuffers_backward import UserbuffersBackwardLinear
from jax_ub._src.parallel import COLUMN, ROW
from jax_ub._src.rules.operands import result_shape
from jax_ub._src.rules.vjp import row_sum
from jax_ub._src.scaled_array import source_of

_RESULT_IS_REDUCED = (
    'linear has tensor_parallel_mode = "row": its result is reduced before anything is '
    "added. Leave the operations unfused"
)
_DX_IS_REDUCED = (
    'linear has tensor_parallel_mode = "column": dx is reduced first. Leave the '
    "operations unfused"
)


def _in_place_mismatch(name, op, wanted):
    """Returns an error text if `op.in_place` is not `wanted`, else ""."""
    if op.in_place == wanted:
        return ""
    kind = type(op).__name__
    return (
        f"{name} = {shown(op)} has in_place = {op.in_place}. Pass "
        f"{name}=ops.{kind}(in_place={wanted}), or leave {kind} unfused"
    )


class _LinearPattern(FusedPattern):
    """Base class of fused operations whose linear may overlap with a collective.

    If a collective overlaps the GEMM of the linear, the field `linear` is a
    `UserbuffersLinear`. `basic_ops` has the operations that this one replaces.
    """

    _overlapped: ClassVar[type[UserbuffersLinear] | None] = None
    linear: Any

    @property
    def overlaps(self):
        return isinstance(self.linear, UserbuffersLinear)

    def _operations_from_keywords(self):
        """Returns {field: operation}, with a fused operation for an overlapped linear.

        A row-parallel `BasicLinear` with `userbuffers_options`, on several ranks, is
        replaced by the fused operation that overlaps its GEMM with its collective.
        """
        found = super()._operations_from_keywords()
        linear, overlapped = found["linear"], self._overlapped
        if overlapped and linear.tensor_parallel_mode == ROW and match([linear])[0]:
            found["linear"] = overlapped(linear=linear)
        return found


class _ForwardLinear(_LinearPattern, ForwardPattern):
    """Base class of fused linears whose GEMM also applies a scale, bias or residual."""

    @classmethod
    def mismatch(cls, linear, add=None, **others):
        is_row = linear.tensor_parallel_mode == ROW
        if isinstance(linear, UserbuffersLinear) and not is_row:
            return "the AG+GEMM of userbuffers adds no residual. Leave it unfused"
        if isinstance(linear, BasicLinear) and is_row:
            return _RESULT_IS_REDUCED
        return "" if add is None else _in_place_mismatch("add", add, wanted=True)

    def forward(self, params, x, extra_inputs, saves):
        num = len(self.linear.basic_ops)
        options: dict[str, Any] = {}
        for i, op in enumerate(self.basic_ops[num:], num):
            if isinstance(op, Bias):
                options |= {"bias": params[i]["bias"], "out_dtype": op.dtype}
            elif isinstance(op, ConstantScale):
                options["scale"] = op.scale
            elif isinstance(op, AddExtraInput):
                (residual,) = extra_inputs[i]
                self._check_residual(op, params[0]["kernel"], x, residual)
                options["residual"] = residual
        if self.overlaps:
            y, _, (saved, *_) = self.linear.forward(
                params[:num], x, extra_inputs[:num], saves[:num], **options
            )
        else:
            y, _, saved = self.linear.forward(params[0], x, (), saves[0], **options)
        residuals = [saved, *({} for _ in self.basic_ops[1:])]
        activation = self.basic_ops[-1]
        if isinstance(activation, Activation):
            y, _, residuals[-1] = activation.forward(params[-1], y, (), saves[-1])
        return y, ((),) * len(residuals), tuple(residuals)

    def _check_residual(self, add, kernel, x, residual):
        linear = self.basic_ops[0]
        config = self.linear.call_config(compute_dtype(linear.dtype, x))
        linear.check_operands(config, source_of(x), kernel)
        add.check(result_shape(config, x, kernel.shape[1]), residual)


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasAdd(_ForwardLinear):
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
        linear: a linear; a row-parallel one needs `userbuffers_options`, and is then
            the `UserbuffersForwardLinear` that overlaps it.
        bias: the bias after the linear, or None.
        add: the `AddExtraInput(in_place=True)` after linear and bias.
    """

    _overlapped = UserbuffersForwardLinear

    linear: Any = pattern_field(BasicLinear, UserbuffersForwardLinear)
    bias: Bias | None = pattern_field(Bias, is_optional=True)
    add: AddExtraInput = pattern_field(AddExtraInput)


@dataclasses.dataclass(frozen=True)
class ForwardLinearBiasActivation(_ForwardLinear):
    """Computes `activation(x @ kernel + bias)`, where the GEMM adds the bias.

    Replaces the forward of `BasicLinear`, `Bias` and an activation function. This saves
    a separate pass for the bias, and the rounding before it. The activation function
    runs after the GEMM.

    Transformer Engine: `ForwardLinearBiasActivation`, which does not support an
    activation function yet.

    Attributes:
        linear: a linear that is not row parallel.
        bias: the bias that the GEMM adds, or None.
        activation: the activation function after the bias, or None.
    """

    _needed = ("bias",)

    linear: BasicLinear = pattern_field(BasicLinear)
    bias: Bias | None = pattern_field(Bias, is_optional=True)
    activation: Activation | None = pattern_field(Activation, is_optional=True)


@dataclasses.dataclass(frozen=True)
class ForwardLinearScaleAdd(_ForwardLinear):
    """Computes `scale * x @ kernel + residual` in one GEMM, overwriting the residual.

    Replaces the forward of `BasicLinear`, `ConstantScale` and
    `AddExtraInput(in_place=True)`, whose extra input is the residual.

    The GEMM scales its result, adds the residual and writes the sum to the residual's
    buffer. This saves two passes and a buffer. Row-parallel linears are not fused,
    because their result is reduced over the ranks before the sum.

    Transformer Engine: `ForwardLinearScaleAdd`.

    Attributes:
        linear: a linear that is not row parallel.
        scale: the scale after the linear.
        add: the `AddExtraInput(in_place=True)` after the scale.
    """

    linear: BasicLinear = pattern_field(BasicLinear)
    scale: ConstantScale = pattern_field(ConstantScale)
    add: AddExtraInput = pattern_field(AddExtraInput)


@dataclasses.dataclass(frozen=True)
class BackwardLinearAdd(_LinearPattern, BackwardPattern):
    """Computes `dy @ kernel.T + d_extra`, a sum of two gradients of x, in one GEMM.

    Replaces the backward of `MakeExtraOutput(in_place=True)` and the linear after it.

    The dgrad GEMM adds `d_extra`, the gradient of the extra output, and reuses its
    buffer for the sum. This saves a pass and a buffer. XLA copies the buffer first if
    it is still read. This is the case, for example, if a later operation returned the
    same array as both gradients, so that the wgrad GEMM reads it.

    Column-parallel linears are not fused, as in Transformer Engine, because their dgrad
    is reduced over the ranks before the sum. A row-parallel linear with
    `userbuffers_options` adds in its AG+GEMM, which Transformer Engine does not
    support.

    Transformer Engine: `BackwardLinearAdd`.

    Attributes:
        backward_add: the `MakeExtraOutput(in_place=True)` before the linear.
        linear: a linear that is not column parallel; a row-parallel one with
            `userbuffers_options` is the `UserbuffersBackwardLinear` that overlaps it.
    """

    _overlapped = UserbuffersBackwardLinear

    backward_add: MakeExtraOutput = pattern_field(MakeExtraOutput)
    linear: Any = pattern_field(BasicLinear, UserbuffersBackwardLinear)

    @classmethod
    def mismatch(cls, backward_add, linear):
        if linear.tensor_parallel_mode == COLUMN:
            return _DX_IS_REDUCED
        return _in_place_mismatch("backward_add", backward_add, wanted=True)

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes dw in one GEMM, and the sum of dx and `d_extra` in another GEMM.

        The basic operations run separately if the sum needs a reduction first, or if
        the linear needs no gradient.
        """
        (d_extra,) = d_extra_outputs[0]
        is_unfused = dy is None or not any(needs[1:])
        if is_unfused or (d_extra is not None and is_partial_sum(d_extra, dy)):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        if not needs[0].x:
            d_extra = None
        if self.overlaps:
            dx, d_params, _ = self.linear.backward(
                residuals[1:], dy, d_extra_outputs[1:], needs[1:], residual=d_extra
            )
        else:
            dx, d_linear, _ = self.linear.backward(
                residuals[1], dy, (), needs[1], residual=d_extra
            )
            d_params = (d_linear,)
        return dx, ({}, *d_params), ((),) * len(self.basic_ops)

    @classmethod
    def unfused_reasons(cls, ops: Sequence[Op]) -> dict[int, str]:
        reasons = {}
        for i, pair in enumerate(zip(ops, ops[1:], strict=False), 1):
            found = cls.match_prefix(pair)
            if found is None:
                continue
            if not found["backward_add"].in_place:
                reasons[i] = "MakeExtraOutput(in_place=False)"
            elif found["linear"].tensor_parallel_mode == COLUMN:
                reasons[i] = "column-parallel: dx is reduced first"
        return reasons


@dataclasses.dataclass(frozen=True)
class BackwardLinearScale(BackwardPattern):
    """Computes the gradients of `scale * (x @ kernel)` in GEMMs that apply the scale.

    Replaces the backward of `BasicLinear` and the `ConstantScale` after it. This saves
    a pass that scales dy, and its buffer. Column-parallel linears are not fused, as in
    Transformer Engine.

    Transformer Engine: `BackwardLinearScale`.

    Attributes:
        linear: a linear that is not column parallel.
        scale: the scale after the linear.
    """

    linear: BasicLinear = pattern_field(BasicLinear)
    scale: ConstantScale = pattern_field(ConstantScale)

    @classmethod
    def mismatch(cls, linear, scale):
        return _DX_IS_REDUCED if linear.tensor_parallel_mode == COLUMN else ""

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes the gradients of x and kernel; each GEMM multiplies by `scale`."""
        dx, d_params, _ = self.linear.backward(
            residuals[0], dy, (), needs[0], scale=self.scale.scale
        )
        return dx, (d_params, {}), ((), ())


@dataclasses.dataclass(frozen=True)
class BackwardActivationBias(BackwardPattern):
    """Computes the gradients of a bias and of the activation after it in one pass.

    The bias gradient is summed from the f32 gradient, before it is rounded.

    Transformer Engine: `BackwardActivationBias`, which fuses only if it quantizes.

    Attributes:
        bias: the bias before the activation function.
        activation: the activation function.
    """

    bias: Bias = pattern_field(Bias)
    activation: Activation = pattern_field(Activation)

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes dx and the bias gradient from one f32 array, each rounded once."""
        dx = self.activation.gradient(residuals[1]["x"], dy)
        d_params = {"bias": row_sum(dx)} if needs[0].params else {}
        return dx.astype(dy.dtype), (d_params, {}), ((), ())


@dataclasses.dataclass(frozen=True)
class BackwardAddRMSNorm(BackwardPattern):
    """Computes the sum of `RMSNorm`'s dx and another gradient of x in one pass.

    The other gradient belongs to the extra output of `MakeExtraOutput`. The sum is
    computed in f32. This saves a separate pass for the sum, and the rounding before it.

    Transformer Engine: `BackwardAddRMSNorm`.

    Attributes:
        add: the `MakeExtraOutput(in_place=False)` before the norm. Its backward adds
            the two gradients.
        rmsnorm: the norm.
    """

    add: MakeExtraOutput = pattern_field(MakeExtraOutput)
    rmsnorm: RMSNorm = pattern_field(RMSNorm)

    @classmethod
    def mismatch(cls, add, rmsnorm):
        return _in_place_mismatch("add", add, wanted=False)

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes dx of the norm plus the gradient of the extra output, in f32."""
        (d_extra,) = d_extra_outputs[0]
        is_unfused = dy is None or d_extra is None or not needs[1].x
        if is_unfused or is_partial_sum(d_extra, dy):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params, _ = self.rmsnorm.backward(residuals[1], dy, (), needs[1])
        dx = dx + d_extra.astype(jnp.float32)
        return dx.astype(d_extra.dtype), ({}, d_params), ((), ())
