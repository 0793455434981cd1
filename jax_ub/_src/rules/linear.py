"""`linear`: a dense layer that is column-parallel, row-parallel or not parallel."""

import dataclasses
from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.methods import Method
from jax_ub._src.parallel import check_parallel, mode_of
from jax_ub._src.primitives import varying
from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.primitives.matmul_all_reduce import matmul_all_reduce as summed
from jax_ub._src.rules import main_grads as accumulators
from jax_ub._src.rules.all_gather_matmul import all_gather_matmul_at
from jax_ub._src.rules.call_config import (
    make_call_config,
    make_local_call_config,
    plain_for_f64,
)
from jax_ub._src.rules.layer import layer
from jax_ub._src.rules.local_gradients import dgrad, local_gradients, local_wgrad
from jax_ub._src.rules.matmul_all_reduce import matmul_all_reduce_at
from jax_ub._src.rules.matmul_reduce_scatter import matmul_reduce_scatter_at
from jax_ub._src.rules.vjp import promote

OP = "linear"
# The layers whose forward pass communicates, by the op of the table of parallel modes.
_FUSED: dict[str, Callable[..., jax.Array]] = {
    "all_gather_matmul": all_gather_matmul_at,
    "matmul_reduce_scatter": matmul_reduce_scatter_at,
    "matmul_all_reduce": matmul_all_reduce_at,
}


def linear(  # noqa: PLR0913, pinned
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    *,
    parallel: str | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    sequence_parallel: bool = True,
    ub_name: str | None = None,
    method: Method | str | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Computes `x @ w + b` with a kernel that may be sharded over the ranks.

    | parallel | sequence_parallel | x | w | result |
    |---|---|---|---|---|
    | None | | `[..., K]` | `[K, N]` | `[..., N]`, no communication |
    | "column" | True | `[..., M/P, K]` | `[K, N/P]` | `[..., M, N/P]`, AG+GEMM |
    | "column" | False | `[..., K]` | `[K, N/P]` | `[..., N/P]`, GEMM+AR backward |
    | "row" | True | `[..., M, K/P]` | `[K/P, N]` | `[..., M/P, N]`, GEMM+RS |
    | "row" | False | `[..., K/P]` | `[K/P, N]` | `[..., N]`, GEMM+AR |

    For "column" without sequence parallelism, `x` is the same on every rank. If
    `jax.shard_map(check_vma=True)` types `x` as not varying over `axis_name`, the
    backward pass returns the full gradient of `x` on every rank. With
    `check_vma=False`, or if `x` is typed as varying, JAX's convention holds: the full
    gradient is the sum of the ranks' gradients.

    Transformer Engine: `te.Linear(parallel_mode=..., ub_name=...)`.

    Args:
        x: activations.
        w: kernel, `[in, out]`.
        b: bias, `[out]`: this rank's columns for "column", the whole bias for "row".
        parallel: the sharded dimension of the kernel: "column" (out), "row" (in) or
            None (neither).
        axis_name: the mesh axis, of size P, that the kernel is sharded over.
        sequence_parallel: whether the activations outside a column-row pair are sharded
            along their rows (axis -2).
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        main_grad: f32 accumulator of the kernel's gradient, of the kernel's shape. Its
            cotangent is `main_grad + dw`, written in place if its buffer is free, and
            the cotangent of `w` is zero. Each call needs a separate main_grad.
        rhs_transposed: whether the kernel is `[out, in]`, such as an embedding that the
            output projection reuses. It is read in place, and its gradient has the same
            layout; `w.T` would copy it.

    Returns:
        The result in the table's last column, summed in f32 and rounded once to the
        dtype of `x`.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such `parallel` or method, or `initialize_ub`
            made no overlap of that `ub_name`.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    _check_kind(parallel, axis_name, sequence_parallel, rhs_transposed)
    mode = mode_of(parallel, sequence_parallel)
    product = _FUSED.get(mode.op, _whole_rows_at)
    if mode.op in _FUSED:
        called = f"{OP} (parallel = {shown(parallel)}): {mode.op}"
        call_config = make_call_config(called, axis_name, ub_name, method, mode=mode)
    else:
        call_config = _open_whole_rows(axis_name if parallel else None, ub_name, method)
    call_config = dataclasses.replace(
        call_config, rhs_transposed=rhs_transposed, bias_name="b"
    )
    given = {"bias": b, "main_grad": main_grad}
    if parallel is None or not sequence_parallel:
        shapes.check_rank(call_config.label, "x", x, 1)
        if x.ndim == 1:
            return product(call_config, x[None], w, **given)[0]
    return product(call_config, x, w, **given)


def _check_kind(parallel, axis_name, sequence_parallel, rhs_transposed):
    if parallel is not None:
        check_parallel(OP, "parallel", parallel)
    if parallel is not None and axis_name is None:
        raise ShapeContractError(
            f"{OP}: parallel = {shown(parallel)} needs the mesh axis that the kernel "
            "is "
            'sharded over, but axis_name = None. Pass it, for example axis_name="tp".'
        )
    shapes.check_flag(OP, "sequence_parallel", sequence_parallel)
    shapes.check_flag(OP, "rhs_transposed", rhs_transposed)


def linear_without_gather(  # noqa: PLR0913, as the functions that communicate
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...] | None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
) -> jax.Array:
    """Computes `x @ w + bias` for layers whose forward pass does not communicate.

    Unlike `linear` it takes a `residual` and an `out_dtype`, as the functions that
    communicate do.

    Args:
        x: activations, `[..., M, K]`, with all features.
        w: kernel, `[K, N/P]`: this rank's columns.
        axis_name: the mesh axis, of size P, that the columns are sharded over; None if
            this rank has all columns.
        bias: `[N/P]`.
        residual: addend of the result, `[..., M, N/P]`, added before rounding.
        ub_name: see `linear`.
        method: see `linear`.
        out_dtype: dtype of the result; None takes the dtype of `x`.
        main_grad: see `linear`.
        rhs_transposed: see `linear`.

    Returns:
        `[..., M, N/P]`.

    Raises:
        ShapeContractError: see `linear`.
        UnknownNameError: see `linear`.
        UnsupportedOverlapError: see `linear`.
    """
    call_config = _open_whole_rows(axis_name, ub_name, method)
    call_config = dataclasses.replace(call_config, rhs_transposed=rhs_transposed)
    given = {"bias": bias, "main_grad": main_grad, "residual": residual}
    return _whole_rows_at(call_config, x, w, out_dtype=out_dtype, **given)


def _open_whole_rows(axis_name, ub_name, method):
    if axis_name is None:
        return make_local_call_config(OP, ub_name, method, mode=mode_of(None, False))
    mode = mode_of("column", False)
    return make_call_config(OP, axis_name, ub_name, method, mode=mode)


@plain_for_f64
def _whole_rows_at(
    call_config, x, w, *, bias, main_grad, residual=None, out_dtype=None
):
    kernel = call_config.kernel(w)
    shapes.check_operands(call_config.label, x, kernel, takes_f64=call_config.takes_f64)
    sharded = "out" if call_config.axis_name else ""
    shapes.check_contraction(
        call_config.label, x, kernel, call_config.num_ranks, sharded
    )
    result = (*x.shape[:-1], kernel.shape[1])
    shapes.check_addends(
        call_config.label,
        bias,
        residual,
        result,
        bias_name=call_config.bias_name,
        takes_f64=shapes.is_f64(x),
    )
    shapes.check_main_grad(call_config.label, main_grad, w)
    out_dtype = shapes.check_out_dtype(call_config.label, out_dtype, x.dtype)
    call_config = call_config.with_dtypes(x.dtype, out_dtype)
    axes = call_config.axes(x, w, bias, residual, main_grad)
    main_grad = accumulators.prepare(call_config.label, main_grad, w, axes)
    own = frozenset(call_config.axis_name)
    is_replicated = call_config.is_vma_checked and not own & varying.axes_of(x)
    x = promote(x, axes - own if is_replicated else axes)
    w, bias, residual = promote((w, bias, residual), axes)
    product = _replicated if is_replicated else _local
    return product(call_config, x, w, bias, residual, main_grad)


def _forward(call_config, x, w, bias, residual):
    return matmul(
        (x,),
        (w,),
        bias,
        residual,
        rhs_transposed=call_config.rhs_transposed,
        out_dtype=call_config.out_dtype,
        **call_config.local,
    )


def _replicated_gradients(call_config, x, w, dy, main_grad):
    # Each rank's columns contribute one summand of x's gradient: GEMM+AR adds them.
    dx = dgrad(call_config, summed, call_config.dgrad.fused, w, dy)
    return dx, local_wgrad(call_config, x, dy, main_grad)


_local = layer(_forward, local_gradients)
_replicated = layer(_forward, _replicated_gradients)
