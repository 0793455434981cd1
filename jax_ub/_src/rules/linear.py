"""Linear layers: the public functions, and `parallel_linear` behind them."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.config.flags import OverlapFlags
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.methods import Method
from jax_ub._src.parallel import KernelShards, ParallelMode, check_parallel, mode_of
from jax_ub._src.primitives import vma
from jax_ub._src.rules import backward
from jax_ub._src.rules.call_config import call_label, make_call_config, plan_call_config
from jax_ub._src.rules.forward import (
    forward_of,
    is_differentiated_by_jax,
    is_replicated,
    with_f64_fallback,
)
from jax_ub._src.rules.operands import (
    as_row,
    as_tuple,
    check_operands,
    claim_main_grads,
    pcast_main_grad,
    pcast_operands,
    result_sharding,
    with_dtypes,
)
from jax_ub._src.scaled_array import ScaledArray, is_scaled, values_of

if TYPE_CHECKING:
    from jax_ub._src.fp8.recipes import Recipe


def linear(  # noqa: PLR0913, pinned
    x: jax.Array | ScaledArray,
    w: jax.Array | ScaledArray,
    b: jax.Array | None = None,
    *,
    parallel: str | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    sequence_parallel: bool = True,
    ub_name: str | None = None,
    method: Method | str | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
    fp8: "Recipe | None" = None,
    fp8_state: Mapping[str, jax.Array] | None = None,
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

    `x` and `w` may both be FP8, as `ub.ScaledArray`s. The gradients arrive in their
    sources. With `fp8`, the layer quantizes `x`, `w` and the gradient of the result,
    all passes multiply FP8 operands, and gradients arrive in the dtypes of `x` and `w`.
    Then `w` may be FP8 already, quantized once for several calls.
    If a recipe has one scale per tensor, all ranks have the same. The residuals of the
    backward pass are FP8, with the checkpoint names "jax_ub.x" and "jax_ub.w".

    Transformer Engine: `te.Linear(parallel_mode=..., ub_name=...)`.

    Args:
        x: activations.
        w: kernel, `[in, out]`.
        b: bias, `[out]`: this rank's columns for "column", the whole bias for "row".
        parallel: the sharded dimension of the kernel: "column" (out), "row" (in) or
            None (neither).
        axis_name: the mesh axis, of size P, that the kernel is sharded over. Not used
            if `parallel` is None.
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
        fp8: an FP8 recipe, by which the layer quantizes its operands.
        fp8_state: state of `DelayedScaling`, from `ub.fp8.init_state`, of this call
            alone. Its gradient is its new value; see `ub.fp8.apply_updates`.

    Returns:
        The result in the table's last column, summed in f32 and rounded once to the
        dtype of `x`. For FP8 it is the dtype of `x.source`, else of `w.source`, else
        bf16.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such `parallel` or method, `initialize_ub`
            made no overlap of that `ub_name`, or a flag is not a bool.
        ConfigurationError: if `fp8` is not a recipe, or `fp8_state` not its state.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    if parallel is not None:
        check_parallel("linear", "parallel", parallel)
        if axis_name is None:
            raise ShapeContractError(
                f"linear: parallel = {shown(parallel)} needs the mesh axis that the "
                "kernel is sharded over, but axis_name = None. Pass it, for example "
                'axis_name="tp".'
            )
    elif axis_name is not None:
        shapes.check_axis_name("linear", axis_name)
    shapes.check_flag("linear", "sequence_parallel", sequence_parallel)
    mode = mode_of(parallel, sequence_parallel)
    op = "linear"
    if mode.op != "matmul":
        op += f" (parallel = {shown(parallel)}): {mode.op}"
    is_vector = False
    if parallel is None or not sequence_parallel:
        shapes.check_rank(call_label(op, ub_name), "x", values_of(x), 1)
        is_vector = x.ndim == 1
        if is_vector:
            x = as_row(x)
    y = parallel_linear(
        mode,
        x,
        w,
        axis_name=axis_name,
        bias=b,
        ub_name=ub_name,
        method=method,
        main_grad=main_grad,
        rhs_transposed=rhs_transposed,
        fp8=fp8,
        fp8_state=fp8_state,
        op=op,
        bias_name="b",
    )
    return y[0] if is_vector else y


def all_gather_matmul(  # noqa: PLR0913, pinned
    x: jax.Array | ScaledArray,
    w: jax.Array | ScaledArray | tuple[jax.Array | ScaledArray, ...],
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    return_gathered: bool = False,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | tuple[jax.Array, ...] | None = None,
    rhs_transposed: bool = False,
    fp8: "Recipe | None" = None,
    fp8_state: Mapping[str, jax.Array] | None = None,
) -> Any:
    """Computes `all_gather(x) @ w`, and overlaps all-gather and GEMM (AG+GEMM).

    Equivalent to `jax.lax.all_gather(x, axis_name, axis=-2, tiled=True) @ w + bias`,
    summed in f32 and rounded once.
    The backward pass reduce-scatters the gradient of `x`. For the gradient of `w` it
    gathers `x` again or reads it from the peers' memory. With `return_gathered` the
    forward pass saves the gathered `x` instead, under the checkpoint names
    "jax_ub.gathered" and "jax_ub.<ub_name>.gathered", which a remat policy may drop.

    `x` and all kernels may be FP8, as `ub.ScaledArray`s; see `linear`. Then the FP8
    values are gathered.

    Transformer Engine: a column-parallel linear with `ub_overlap_ag`.

    Args:
        x: activations, `[..., M/P, K]`: this rank's rows.
        w: kernel, `[K, N/P]`: this rank's columns; or a tuple of kernels, which share
            one gather.
        axis_name: the mesh axis, of size P, to gather over.
        bias: `[N/P]`, or a tuple of one for each kernel.
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        return_gathered: whether to return the gathered `x`, too.
        out_dtype: dtype of the product; None takes the dtype of `x`.
        main_grad: f32 accumulator of the kernel's gradient, `[K, N/P]`; a tuple if `w`
            is a tuple. Its cotangent is `main_grad + dw`, written in place if its
            buffer is free, and the cotangent of `w` is zero.
        rhs_transposed: whether kernels are stored as `[N/P, K]`, such as this rank's
            shard of an embedding that the output projection reuses. They are read in
            place, and their gradients have the same layout; `w.T` would copy them.
        fp8: an FP8 recipe; see `linear`.
        fp8_state: its state; see `linear`.

    Returns:
        The product `[..., M, N/P]`, or a tuple of products if `w` is a tuple. With
        `return_gathered`, a pair of that and the gathered x, `[..., M, K]`.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such method, `initialize_ub` made no overlap
            of that `ub_name`, or a flag is not a bool.
        ConfigurationError: if `fp8` is not a recipe, or `fp8_state` not its state.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    return parallel_linear(
        mode_of("column", True),
        x,
        w,
        axis_name=axis_name,
        bias=bias,
        ub_name=ub_name,
        method=method,
        return_gathered=return_gathered,
        out_dtype=out_dtype,
        main_grad=main_grad,
        rhs_transposed=rhs_transposed,
        fp8=fp8,
        fp8_state=fp8_state,
    )


def matmul_reduce_scatter(  # noqa: PLR0913, pinned
    x: jax.Array | ScaledArray,
    w: jax.Array | ScaledArray,
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
    fp8: "Recipe | None" = None,
    fp8_state: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Computes `reduce_scatter(x @ w)`, and overlaps GEMM and reduce-scatter (GEMM+RS).

    Equivalent to `jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=-2,
    tiled=True) + bias + residual`, summed in f32 and rounded once. The backward pass
    reads the gradient of the result directly from the peers' memory, or gathers it once
    for dgrad and wgrad.

    `x` and `w` may both be FP8, as `ub.ScaledArray`s; see `linear`.

    Transformer Engine: a row-parallel linear with `ub_overlap_rs`.

    Args:
        x: activations, `[..., M, K/P]`: this rank's features.
        w: kernel, `[K/P, N]`: this rank's rows.
        axis_name: the mesh axis, of size P, to reduce over.
        bias: `[N]`, added once.
        residual: `[..., M/P, N]`, added to this rank's rows.
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        out_dtype: dtype of the result; None takes the dtype of `x`.
        main_grad: f32 accumulator of the kernel's gradient, `[K/P, N]`. Its cotangent
            is `main_grad + dw`, written in place if its buffer is free, and the
            cotangent of `w` is zero.
        rhs_transposed: whether the kernel is stored as `[N, K/P]`. It is read in place,
            and its gradient has the same layout; `w.T` would copy it.
        fp8: an FP8 recipe; see `linear`.
        fp8_state: its state; see `linear`.

    Returns:
        `[..., M/P, N]`: this rank's rows.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such method, `initialize_ub` made no overlap
            of that `ub_name`, or `rhs_transposed` is not a bool.
        ConfigurationError: if `fp8` is not a recipe, or `fp8_state` not its state.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    return parallel_linear(
        mode_of("row", True),
        x,
        w,
        axis_name=axis_name,
        bias=bias,
        residual=residual,
        ub_name=ub_name,
        method=method,
        out_dtype=out_dtype,
        main_grad=main_grad,
        rhs_transposed=rhs_transposed,
        fp8=fp8,
        fp8_state=fp8_state,
    )


def matmul_all_reduce(  # noqa: PLR0913, pinned
    x: jax.Array | ScaledArray,
    w: jax.Array | ScaledArray,
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | None = None,
    rhs_transposed: bool = False,
    fp8: "Recipe | None" = None,
    fp8_state: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Computes `all_reduce(x @ w)`, and overlaps GEMM and all-reduce (GEMM+AR).

    Equivalent to `jax.lax.psum(x @ w, axis_name) + bias + residual`, summed in f32 and
    rounded once. Bias and residual are the same on every rank and are added once, after
    the reduction.

    Under `jax.shard_map(check_vma=True)` neither the result nor its gradient varies
    over `axis_name`, so the backward pass does not communicate. With `check_vma=False`
    JAX's convention holds: the gradient of a replicated value is the sum of the ranks'
    gradients, so the backward pass all-reduces it first.

    `x` and `w` may both be FP8, as `ub.ScaledArray`s; see `linear`.

    Transformer Engine: a row-parallel linear without sequence parallelism, which it
    does not overlap.

    Args:
        x: activations, `[..., M, K/P]`: this rank's features.
        w: kernel, `[K/P, N]`: this rank's rows.
        axis_name: the mesh axis, of size P, to reduce over.
        bias: `[N]`, the same on every rank.
        residual: `[..., M, N]`, the same on every rank.
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        out_dtype: dtype of the result; None takes the dtype of `x`.
        main_grad: f32 accumulator of the kernel's gradient, `[K/P, N]`. Its cotangent
            is `main_grad + dw`, written in place if its buffer is free, and the
            cotangent of `w` is zero.
        rhs_transposed: whether the kernel is stored as `[N, K/P]`. It is read in place,
            and its gradient has the same layout; `w.T` would copy it.
        fp8: an FP8 recipe; see `linear`.
        fp8_state: its state; see `linear`.

    Returns:
        `[..., M, N]`, the same on every rank.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`, or if bias or residual varies over
            the ranks.
        UnknownNameError: if there is no such method, `initialize_ub` made no overlap
            of that `ub_name`, or `rhs_transposed` is not a bool.
        ConfigurationError: if `fp8` is not a recipe, or `fp8_state` not its state.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    return parallel_linear(
        mode_of("row", False),
        x,
        w,
        axis_name=axis_name,
        bias=bias,
        residual=residual,
        ub_name=ub_name,
        method=method,
        out_dtype=out_dtype,
        main_grad=main_grad,
        rhs_transposed=rhs_transposed,
        fp8=fp8,
        fp8_state=fp8_state,
    )


def parallel_linear(  # noqa: PLR0913, the arguments of all linear layers
    mode: ParallelMode,
    x: jax.Array | ScaledArray,
    w: jax.Array | ScaledArray | tuple[jax.Array | ScaledArray, ...],
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    main_grad: jax.Array | tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    fp8_state: Any = None,
    *,
    axis_name: str | tuple[str, ...] | None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    flags: OverlapFlags | None = None,
    return_gathered: bool = False,
    out_dtype: DTypeLike | None = None,
    rhs_transposed: bool = False,
    fp8: "Recipe | None" = None,
    op: str | None = None,
    bias_name: str = "bias",
    shards: KernelShards | None = None,
) -> Any:
    """Computes a linear layer from one rank's shards, with the collectives of `mode`.

    Args:
        mode: the layer's row in the table of parallel modes.
        x: activations, `[..., tokens, K]`.
        w: kernel; for AG+GEMM also a tuple of kernels, which share one all-gather.
        bias: of "out" features; a tuple if `w` is a tuple.
        main_grad: see `linear`; a tuple if `w` is a tuple.
        residual: addend of the result, before rounding; only for a single kernel.
        fp8_state: see `linear`. Several kernels share its scales.
        axis_name: the mesh axis of the ranks; None if the layer is not parallel.
        ub_name: see `linear`.
        method: see `linear`.
        flags: the layer's `ub_*` flags.
        return_gathered: whether to return the gathered `x`, too; only for AG+GEMM.
        out_dtype: dtype of the result; None takes the dtype of `x`.
        rhs_transposed: see `linear`.
        fp8: see `linear`.
        op: the layer's name in errors; None takes the name of the op.
        bias_name: the caller's name of `bias`, for errors.
        shards: how FSDP shards w and main_grad; None if they are whole.
    """
    op = op or mode.op
    if mode.parallel is None:
        config = plan_call_config(op, (), 1, ub_name, method)
    else:
        is_fp8 = fp8 is not None or is_scaled(x)
        config = make_call_config(
            op, axis_name, ub_name, method, mode=mode, is_fp8=is_fp8, flags=flags
        )
    label = config.label
    shapes.check_flag(label, "return_gathered", return_gathered)
    shapes.check_flag(label, "rhs_transposed", rhs_transposed)
    is_tuple = config.mode.gathers_x and isinstance(w, tuple)
    ws: Any = w if is_tuple else (w,)
    config, scope = with_f64_fallback(config, x)
    config = dataclasses.replace(
        config,
        rhs_transposed=rhs_transposed,
        returns_gathered=return_gathered,
        bias_name=bias_name,
        fp8=fp8,
        shards=shards,
    )
    biases = as_tuple(label, bias_name, bias, is_tuple, len(ws))
    main_grads = as_tuple(label, "main_grad", main_grad, is_tuple, len(ws))
    dtype = check_operands(config, x, ws, biases, residual, out_dtype)
    main_grads = main_grads and claim_main_grads(label, main_grads, ws)
    config, layer, (x, ws, states) = _layer_and_operands(config, x, ws, fp8_state)
    config = with_dtypes(config, x, ws, dtype)
    sharding = result_sharding(config, x, ws[0])
    x, ws, biases, residual, main_grads = vma.unsharded(
        (x, ws, biases, residual, main_grads)
    )
    axes = config.axes(x, ws, biases, residual, main_grads)
    main_grads = main_grads and tuple(
        pcast_main_grad(label, main_grad, axes) for main_grad in main_grads
    )
    own = frozenset(config.axis_name)
    config = dataclasses.replace(config, is_x_replicated=is_replicated(config, x))
    # The operands are cast before the `custom_vjp` is called. The transposes of the
    # casts sum the gradients over the mesh axes that the casts add.
    x = pcast_operands(x, axes - own if config.is_x_replicated else axes)
    ws = pcast_operands(ws, axes)
    addend_axes = axes - own if mode.op == "matmul_all_reduce" else axes
    biases, residual = vma.pcast_varying((biases, residual), addend_axes)
    if is_differentiated_by_jax(config, (x, ws, biases, residual), main_grads):
        layer = forward_of(config)
    with scope, jax.disable_jit(False):  # see `vjp.differentiable`
        ys, gathered = layer(config, x, ws, biases, residual, main_grads, *states)
    y = ys if is_tuple else vma.with_sharding(ys[0], sharding)
    return (y, gathered) if return_gathered else y


def _layer_and_operands(config, x, ws, state):
    """Returns a layer's settings, its `custom_vjp`, and (x, kernels, FP8 states)."""
    layers: Any = backward
    operands: Any = x, ws, ()
    if config.fp8 is not None or state is not None or is_scaled(x):
        # Imported only here, because most programs do not use FP8.
        from jax_ub._src.rules import scaled

        config, ws = scaled.with_whole_blocks(config, x, ws)
        layers, operands = scaled, scaled.quantized(config, x, ws, state)
    layer = layers.column_linear if config.mode.gathers_x else layers.row_linear
    return config, layer, operands
