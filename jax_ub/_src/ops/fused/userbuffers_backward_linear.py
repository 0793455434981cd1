"""Backward of a linear whose GEMMs run at the same time as its collectives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.methods import Method
from jax_ub._src.ops.fused import userbuffers_linear as userbuffers
from jax_ub._src.ops.operation import Op
from jax_ub._src.primitives.all_reduce import all_reduce
from jax_ub._src.rules.bias import row_sum
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.column_gradients import column_gradients
from jax_ub._src.rules.row_gradients import row_gradients
from jax_ub._src.rules.vjp import promote

OP = "UserbuffersBackwardLinear"


@dataclasses.dataclass(frozen=True, init=False)
class UserbuffersBackwardLinear(userbuffers.UserbuffersLinear):
    """Computes a linear's gradients with GEMMs that overlap with communication.

    | mode | method | dgrad GEMM | wgrad GEMM |
    |---|---|---|---|
    | "column" | "bulk" | during the gather of x | during the scatter of dx |
    | "column" | others | GEMM+RS | reads x from the peers, or gathers it once |
    | "row" | all | AG+GEMM | reads the dy that the AG+GEMM gathered |

    If only the input needs a gradient, no wgrad GEMM runs. The method "bulk" then has
    no GEMM to overlap the scatter with, so the dgrad GEMM runs as GEMM+RS. If only the
    kernel needs a gradient, no dgrad GEMM runs.

    Transformer Engine: `UserbuffersBackwardLinear`, for the patterns in
    `userbuffers_linear`.
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
        """Computes a linear's gradients from arrays, inside `jax.shard_map`.

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
                configured for `ub_comm_name`, else `JAX_UB_METHOD`, else "auto".
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
        for name, array in (("weight", weight), ("input", input)):
            if array is not None:
                shapes.check_array(OP, name, array)
        for name, flag in (
            ("input_requires_grad", input_requires_grad),
            ("weight_requires_grad", weight_requires_grad),
            ("bias_requires_grad", bias_requires_grad),
        ):
            shapes.check_flag(OP, name, flag)
        shapes.check_array(OP, "grad_output", grad_output)
        if dtype is None:
            given = [a for a in (weight, input, grad_output) if a is not None]
            dtype = given[0].dtype
        call_config = userbuffers.open_linear(
            OP,
            tensor_parallel_mode,
            axis_name,
            sequence_parallel,
            ub_comm_name,
            method,
            dtype,
            is_backward=True,
        )
        x = _required(call_config, "input", input, "weight", weight_requires_grad)
        w = _required(call_config, "weight", weight, "input", input_requires_grad)
        _check(call_config, tensor_parallel_mode, grad_output, x, w)
        _check_addends(
            call_config, tensor_parallel_mode, grad_output, x, w, main_grad, residual
        )
        dx, dw = gradients(
            call_config, tensor_parallel_mode, grad_output, x, w, main_grad, residual
        )
        db = row_sum(grad_output) if bias_requires_grad else None
        if db is not None and tensor_parallel_mode == "row":
            db = all_reduce(promote(db, call_config.axes(db)), **call_config.alone)
        return dx, dw, {"grad_bias": db}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Computes dx and the gradients of kernel and bias, overlapped."""
        if dy is None or not any(needs):
            return super().backward(residuals, dy, d_extra_outputs, needs)
        dx, d_params = window_gradients(OP, self.basic_ops, residuals, dy, needs)
        return dx, d_params, ((),) * len(self.basic_ops)

    @classmethod
    def fuse_backward_ops(cls, ops: Sequence[Op], **unused: Any) -> list[Op]:
        """Replaces each linear that can overlap, and its bias and reduce-scatter.

        `userbuffers_linear` lists the three patterns of consecutive operations.
        """
        return cls.fuse(ops)


def window_gradients(op, basic_ops, residuals, dy, needs, residual=None):
    """Computes dx and the gradients of the parameters of an overlapped linear.

    `basic_ops` are the linear and the bias or reduce-scatter that run with it. The
    parameter gradients are dicts, one for each of them.

    `residual` is added to dx if it is not None.
    """
    window = userbuffers.Window.of(basic_ops)
    linear, saved = window.linear, residuals[0]
    x = saved.get("x") if linear.wants_wgrad(needs[0]) else None
    w = saved.get("kernel") if needs[0].x else None
    main_grad = saved.get("main_grad") if x is not None else None
    dtype = next((a.dtype for a in (x, w) if a is not None), dy.dtype)
    call_config = window.call_config(op, dtype, is_backward=True)
    call_config = call_config.with_dw_dtype(linear.param_dtype)
    dx, dw = gradients(call_config, window.mode, dy, x, w, main_grad, residual)
    if dx is None:
        dx = residual
    d_params: list[dict] = [{} for _ in basic_ops]
    if x is not None:
        d_params[0]["kernel" if main_grad is None else "main_grad"] = dw
    if window.bias is not None and needs[1].params:
        d_params[1]["bias"] = _own_bias_gradient(call_config, window, dy)
    return dx, tuple(d_params)


def gradients(
    call_config: CallConfig,
    mode: str,
    dy: jax.Array,
    x: jax.Array | None,
    w: jax.Array | None,
    main_grad: jax.Array | None,
    residual: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes dx and dw of a linear with overlapped communication.

    dx is None if `w` is None, and dw is None if `x` is None.

    `main_grad` is added to dw and `residual` to dx if they are given.
    """
    if x is None and w is None:
        return None, None
    operands = (dy, x, w, main_grad, residual)
    axes = call_config.axes(*(a for a in operands if a is not None))
    dy = promote(dy, axes)
    x, w = _prepared(x, axes, call_config.dtype), _prepared(w, axes, call_config.dtype)
    residual = _prepared(residual, axes)
    if mode == "row":
        return row_gradients(call_config, x, w, dy, main_grad, residual)
    return column_gradients_of_one(call_config, x, w, dy, main_grad, residual)


def column_gradients_of_one(call_config, x, w, dy, main_grad, residual):
    """Computes dx and dw of a column-parallel linear with a single kernel.

    `column_gradients` computes them for one or several kernels with the same input.
    """
    saved = {
        "x": x,
        "gathered": None,
        "ws": None if w is None else (w,),
        "main_grads": None if main_grad is None else (main_grad,),
    }
    dx, dws = column_gradients(call_config, saved, {0: dy}, None)
    if residual is not None and dx is not None:
        dx = (residual + dx).astype(residual.dtype)
    return dx, dws.get(0)


def _own_bias_gradient(call_config, window, dy):
    """Returns the gradient of this rank's bias, a sum of dy over tokens.

    If the bias is replicated, the operation group sums the results of all ranks.
    """
    db = row_sum(dy)
    if window.reduce_scatter is None:
        return db
    # The bias is added before the reduce-scatter, so y contains the sum of all ranks'
    # biases, and each bias has the gradient of this sum: dy summed over all tokens of
    # all ranks. Its type is varying. If the bias is replicated, the caller therefore
    # sums the gradient over the ranks once more.
    return promote(
        all_reduce(promote(db, call_config.axes(db)), **call_config.alone),
        call_config.axes(db),
    )


def _prepared(array, axes, dtype=None):
    if array is None:
        return None
    return promote(array, axes).astype(dtype or array.dtype)


def _required(call_config, name, array, of, wanted):
    if not wanted:
        return None
    if array is None:
        raise ShapeContractError(
            f"{call_config.label}: {name} is None, but the gradient of the {of} needs "
            f"it. "
            f"Pass it, or {of}_requires_grad=False."
        )
    return array


def _check(call_config, mode, dy, x, w):
    userbuffers.check_activation(call_config, "grad_output", dy)
    if w is not None:
        shapes.check_float(call_config.label, weight=w)
        shapes.check_kernel(call_config.label, "weight", w)
        if dy.shape[-1] != w.shape[1]:
            raise ShapeContractError(
                f"{call_config.label}: grad_output {dy.shape} has N = {dy.shape[-1]}, "
                f"but "
                f"weight {w.shape} has N = {w.shape[1]}. Kernels are [in, out], as in "
                "the forward; pass the weight untransposed."
            )
    if x is not None:
        userbuffers.check_activation(call_config, "input", x)
        if w is not None:
            sharded = "out" if mode == "column" else "in"
            shapes.check_contraction(
                call_config.label, x, w, call_config.num_ranks, sharded
            )
        _check_rows(call_config, mode, dy, x)


def _check_rows(call_config, mode, dy, x):
    if mode == "column":
        rows = x.shape[-2] * call_config.num_ranks
    else:
        shapes.check_divides(call_config.label, x, call_config.num_ranks)
        rows = x.shape[-2] // call_config.num_ranks
    wanted = (*x.shape[:-2], rows, dy.shape[-1])
    meaning = f"[..., M, N/P] for input {tuple(x.shape)}"
    if mode == "row":
        meaning = f"[..., M/P, N] for input {tuple(x.shape)}"
    shapes.check_shape(call_config.label, "grad_output", dy, wanted, meaning)


def _check_addends(call_config, mode, dy, x, w, main_grad, residual):
    if main_grad is not None and x is None:
        raise ShapeContractError(
            f"{call_config.label}: main_grad is given, but weight_requires_grad = "
            f"False. "
            "Leave it out where the kernel is frozen."
        )
    if main_grad is not None:
        features = (x.shape[-1], dy.shape[-1])
        like_kernel = jax.ShapeDtypeStruct(features, jnp.float32)
        shapes.check_main_grad(call_config.label, main_grad, like_kernel)
    if residual is None:
        return
    if w is None:
        raise ShapeContractError(
            f"{call_config.label}: residual is given, but input_requires_grad = "
            f"False. Leave "
            "it out where no gradient of the input is computed."
        )
    shapes.check_float(call_config.label, residual=residual)
    rows, ranks = dy.shape[-2], call_config.num_ranks
    rows = rows // ranks if mode == "column" else rows * ranks
    wanted = (*dy.shape[:-2], rows, w.shape[0])
    shapes.check_shape(
        call_config.label, "residual", residual, wanted, "the input's shape"
    )
