"""Backward of linears whose GEMMs overlap with their collectives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.methods import Method
from jax_ub._src.ops.fused_operation import BackwardPattern
from jax_ub._src.ops.linear_gemms import gradient_dtype, gradients
from jax_ub._src.ops.userbuffers import (
    UserbuffersLinear,
    check_activation,
    check_input,
    check_weight,
    overlapped_call_config,
)
from jax_ub._src.parallel import COLUMN, ROW, mode_of
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_reduce
from jax_ub._src.rules.backward import dgrad_config
from jax_ub._src.rules.operands import result_shape
from jax_ub._src.rules.vjp import row_sum
from jax_ub._src.scaled_array import dequantized


@dataclasses.dataclass(frozen=True)
class UserbuffersBackwardLinear(UserbuffersLinear, BackwardPattern):
    """Computes a linear layer's gradients with GEMMs that overlap with communication.

    | mode | method | dgrad GEMM | wgrad GEMM |
    |---|---|---|---|
    | "column" | "bulk" | during the gather of x | during the scatter of dx |
    | "column" | others | GEMM+RS | reads x from the peers, or gathers it once |
    | "row" | all | AG+GEMM | reads the dy that the AG+GEMM gathered |

    If only the input needs a gradient, no wgrad GEMM runs. The method "bulk" then has
    no GEMM to overlap the scatter with, so the dgrad GEMM runs as GEMM+RS. If only the
    kernel needs a gradient, no dgrad GEMM runs.

    Transformer Engine: `UserbuffersBackwardLinear`.
    """

    @staticmethod
    def functional_backward(  # noqa: PLR0913, Transformer Engine's names
        grad_output: jax.Array,
        input: jax.Array | None,
        weight: jax.Array | None,
        *,
        input_requires_grad: bool = True,
        weight_requires_grad: bool = True,
        bias_requires_grad: bool = False,
        main_grad: jax.Array | None = None,
        residual: jax.Array | None = None,
        tensor_parallel_mode: str,
        axis_name: str | tuple[str, ...],
        sequence_parallel: bool = True,
        ub_comm_name: str | None = None,
        method: Method | str | None = None,
        dtype: DTypeLike | None = None,
    ) -> tuple[jax.Array | None, jax.Array | None, dict[str, jax.Array | None]]:
        """Computes a linear layer's gradients with overlapped GEMMs inside `shard_map`.

        It is not differentiable.

        | mode | grad_output | input, grad_input | weight, grad_weight |
        |---|---|---|---|
        | "column" | `[..., M, N/P]` | `[..., M/P, K]` | `[K, N/P]` |
        | "row" | `[..., M/P, N]` | `[..., M, K/P]` | `[K/P, N]` |

        Args:
            grad_output: gradient of the result.
            input: activations of the forward; may be None if `weight_requires_grad` is
                False.
            weight: kernel, `[in, out]`; may be None if `input_requires_grad` is False.
            input_requires_grad: whether grad_input is computed.
            weight_requires_grad: whether grad_weight is computed; False for a frozen
                kernel.
            bias_requires_grad: whether grad_bias is computed.
            main_grad: f32 accumulator with the shape of `weight`. grad_weight is then
                `main_grad` plus the gradient, in f32. It reuses the buffer of
                `main_grad` if that is not read later.
            residual: another gradient of the input, with its shape. grad_input is then
                the sum of both, rounded once to the dtype of `residual`. For "row" it
                reuses the buffer of `residual` if that is not read later.
            tensor_parallel_mode: "column" or "row".
            axis_name: the mesh axis of the P ranks.
            sequence_parallel: must be True; only collectives of rows are overlapped.
            ub_comm_name: name of the overlap configuration; also in error messages.
            method: how GEMM and communication overlap. None takes the method that is
                configured for `ub_comm_name`, else `JAX_UB_METHOD`, else "auto";
                `JAX_UB_METHOD=xla` takes precedence over the configuration.
            dtype: dtype of the computation and the results; None takes the dtype of
                `weight`, else of `input`, else of `grad_output`.

        Returns:
            grad_input, grad_weight and {"grad_bias": ...}; None for a gradient that was
            not requested. grad_bias is the sum of `grad_output` over all rows, in f32:
            `[N/P]` for "column"; `[N]` for "row", where it is also summed over the
            ranks.

        Raises:
            ShapeContractError: if an operand is missing, or shapes do not match.
            UnknownNameError: if the mode or the method is unknown.
            UnsupportedOverlapError: if `sequence_parallel` is False, or if an
                explicitly requested method cannot run here.
        """
        op = "UserbuffersBackwardLinear"
        arrays = {"weight": weight, "input": input, "grad_output": grad_output}
        for name, array in arrays.items():
            if array is not None or name == "grad_output":
                checks.check_array(op, name, array)
        checks.check_flag(op, "input_requires_grad", input_requires_grad)
        checks.check_flag(op, "weight_requires_grad", weight_requires_grad)
        checks.check_flag(op, "bias_requires_grad", bias_requires_grad)
        if dtype is None:
            checks.check_float(op, weight=weight)
            dtype = gradient_dtype({"kernel": weight, "x": input}, grad_output)
        config = overlapped_call_config(
            op,
            tensor_parallel_mode,
            axis_name,
            sequence_parallel,
            ub_comm_name,
            method,
            dtype,
            is_backward=True,
        )
        x = _required(config, "input", input, "weight", weight_requires_grad)
        w = _required(config, "weight", weight, "input", input_requires_grad)
        _check_gradients(config, grad_output, x, w, main_grad, residual)
        operands = {"x": x, "kernel": w, "main_grad": main_grad}
        dx, dw, _ = gradients(config, grad_output, operands, residual)
        db = _bias_gradient(config, grad_output) if bias_requires_grad else None
        return dx, dw, {"grad_bias": db}

    def backward(self, residuals, dy, d_extra_outputs, needs, *, residual=None):
        """Computes the gradients of x, kernel and bias with overlapped GEMMs.

        `residual`, another gradient of x, is added to dx.
        """
        linear = self.linear
        dy = dy if linear.takes_quantized_grad else dequantized(dy)
        config = self.call_config(gradient_dtype(residuals[0], dy))
        config = dataclasses.replace(config, dw_dtype=np.dtype(linear.param_dtype))
        dx, dw, state = gradients(config, dy, residuals[0], residual)
        d_params: list[dict] = [{} for _ in self.basic_ops]
        d_params[0] = {**state, linear.accumulated: dw}
        if self.bias is not None and needs[1].params:
            db = _bias_gradient(config, dy)
            if self.reduce_scatter is not None:
                # The reduce-scatter of the forward pass adds the biases of all ranks to
                # each token, so the gradient of each bias is dy summed over the tokens
                # of all ranks. The gradient is cast to vary over the ranks: if the bias
                # is replicated, JAX then also adds the gradients of its P copies.
                db = vma.pcast_varying(db, config.axes(db))
            d_params[1]["bias"] = db
        return dx, tuple(d_params), ((),) * len(self.basic_ops)


def _bias_gradient(config, dy):
    """Returns the gradient of the bias: dy, summed over the tokens of all ranks."""
    db = row_sum(dequantized(dy))
    if config.mode.gathers_x:
        return db
    return all_reduce(config.collective, vma.pcast_varying(db, config.axes(db)))


def _required(config, name, array, of, is_wanted):
    if is_wanted and array is None:
        raise ShapeContractError(
            f"{config.label}: {name} is None, but the gradient of the {of} needs it. "
            f"Pass it, or {of}_requires_grad=False."
        )
    return array if is_wanted else None


def _check_gradients(config, dy, x, w, main_grad, residual):
    """Checks the operands of the backward pass: dy, input, weight, and the addends."""
    label, gathers = config.label, config.mode.gathers_x
    check_activation(config, "grad_output", dy)
    if w is not None:
        check_weight(config, w)
        if dy.shape[-1] != w.shape[1]:
            raise ShapeContractError(
                f"{label}: grad_output {dy.shape} has N = {dy.shape[-1]}, but weight "
                f"{w.shape} has N = {w.shape[1]}. Kernels are [in, out], as in the "
                "forward; pass the weight untransposed."
            )
    if x is not None:
        check_input(config, x, w)
        meaning = "[..., M, N/P]" if gathers else "[..., M/P, N]"
        meaning += f" for input {tuple(x.shape)}"
        wanted = result_shape(config, x, dy.shape[-1])
        checks.check_shape(label, "grad_output", dy, wanted, meaning)
    if main_grad is not None:
        if x is None:
            raise ShapeContractError(
                f"{label}: main_grad is given, but weight_requires_grad = False. Leave "
                "out main_grad if the kernel is frozen."
            )
        kernel = jax.ShapeDtypeStruct((x.shape[-1], dy.shape[-1]), jnp.float32)
        checks.check_main_grad(label, main_grad, kernel)
    if residual is None:
        return
    if w is None:
        raise ShapeContractError(
            f"{label}: residual is given, but input_requires_grad = False. Leave out "
            "residual if no gradient of the input is computed."
        )
    checks.check_float(label, residual=residual)
    dgrad = dgrad_config(config, mode_of(ROW if gathers else COLUMN, True))
    wanted = result_shape(dgrad, dy, w.shape[0])
    checks.check_shape(label, "residual", residual, wanted, "the input's shape")
