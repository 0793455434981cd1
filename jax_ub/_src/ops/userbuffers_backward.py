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
    overlapped_call_config,
)
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_reduce
from jax_ub._src.rules.operands import pcast_operands, result_shape
from jax_ub._src.rules.vjp import as_factor, row_sum
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

    Transformer Engine: `UserbuffersBackwardLinear`. The attributes are those of
    `UserbuffersForwardLinear`.
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
        _check_backward(config, grad_output, x, w)
        _check_addends(config, grad_output, x, w, main_grad, residual)
        operands = {"x": x, "kernel": w, "main_grad": main_grad}
        dx, dw, _ = _gradients(config, grad_output, operands, residual)
        db = row_sum(grad_output) if bias_requires_grad else None
        if db is not None and not config.mode.gathers_x:
            db = _sum_over_ranks(config, db)
        return dx, dw, {"grad_bias": db}

    def backward(self, residuals, dy, d_extra_outputs, needs, *, residual=None):
        """Computes the gradients of x, kernel and bias with overlapped GEMMs.

        `residual`, another gradient of x, is added to dx.
        """
        linear = self.linear
        dy = dy if linear.takes_quantized_grad else dequantized(dy)
        dtype = gradient_dtype(residuals[0], dy)
        config = self.call_config(dtype, is_backward=True)
        config = dataclasses.replace(config, dw_dtype=np.dtype(linear.param_dtype))
        dx, dw, state = _gradients(config, dy, residuals[0], residual)
        d_params: list[dict] = [{} for _ in self.basic_ops]
        d_params[0] = {**state, linear.accumulated: dw}
        if self.bias is not None and needs[1].params:
            db = row_sum(dequantized(dy))
            if self.reduce_scatter is not None:
                # The reduce-scatter of the forward pass adds the biases of all ranks to
                # each token, so the gradient of each bias is dy summed over the tokens
                # of all ranks. The gradient is cast to vary over the ranks: if the bias
                # is replicated, JAX then also adds the gradients of its P copies.
                axes = config.axes(db)
                db = vma.pcast_varying(_sum_over_ranks(config, db), axes)
            d_params[1]["bias"] = db
        return dx, tuple(d_params), ((),) * len(self.basic_ops)


def _sum_over_ranks(config, db):
    return all_reduce(config.collective, vma.pcast_varying(db, config.axes(db)))


def _gradients(config, dy, residuals, residual):
    """Computes dx, dw and the new FP8 state of a linear with overlapped GEMMs.

    The operands are first cast to one dtype and to vary over the same mesh axes.
    """
    if not jax.tree.leaves(residuals):
        return None, None, {}
    operands = {name: residuals.get(name) for name in ("x", "kernel")}
    axes = config.axes(dy, operands, residuals.get("main_grad"), residual)
    dy, operands, residual = pcast_operands((dy, operands, residual), axes)
    casts = {
        name: None if array is None else as_factor(array, config.dtype)
        for name, array in operands.items()
    }
    return gradients(config, dy, {**residuals, **casts}, residual)


def _required(config, name, array, of, is_wanted):
    if is_wanted and array is None:
        raise ShapeContractError(
            f"{config.label}: {name} is None, but the gradient of the {of} needs it. "
            f"Pass it, or {of}_requires_grad=False."
        )
    return array if is_wanted else None


def _check_backward(config, dy, x, w):
    check_activation(config, "grad_output", dy)
    if w is not None:
        checks.check_float(config.label, weight=w)
        checks.check_kernel(config.label, "weight", w)
        if dy.shape[-1] != w.shape[1]:
            raise ShapeContractError(
                f"{config.label}: grad_output {dy.shape} has N = {dy.shape[-1]}, but "
                f"weight {w.shape} has N = {w.shape[1]}. Kernels are [in, out], as in "
                "the forward; pass the weight untransposed."
            )
    if x is None:
        return
    check_activation(config, "input", x)
    if w is not None:
        num_ranks, sharded = config.num_ranks, config.mode.sharded
        checks.check_contraction(config.label, x, w, num_ranks, sharded)
    meaning = "[..., M, N/P]"
    if not config.mode.gathers_x:
        checks.check_divides(config.label, x, config.num_ranks)
        meaning = "[..., M/P, N]"
    meaning += f" for input {tuple(x.shape)}"
    wanted = result_shape(config, x, dy.shape[-1])
    checks.check_shape(config.label, "grad_output", dy, wanted, meaning)


def _check_addends(config, dy, x, w, main_grad, residual):
    if main_grad is not None and x is None:
        raise ShapeContractError(
            f"{config.label}: main_grad is given, but weight_requires_grad = False. "
            "Leave out main_grad if the kernel is frozen."
        )
    if main_grad is not None:
        shape = (x.shape[-1], dy.shape[-1])
        kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
        checks.check_main_grad(config.label, main_grad, kernel)
    if residual is None:
        return
    if w is None:
        raise ShapeContractError(
            f"{config.label}: residual is given, but input_requires_grad = False. "
            "Leave out residual if no gradient of the input is computed."
        )
    checks.check_float(config.label, residual=residual)
    rows, ranks = dy.shape[-2], config.num_ranks
    rows = rows // ranks if config.mode.gathers_x else rows * ranks
    wanted = (*dy.shape[:-2], rows, w.shape[0])
    checks.check_shape(config.label, "residual", residual, wanted, "the input's shape")
