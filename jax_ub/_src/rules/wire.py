"""Collectives of linear layers, which may send wide arrays as FP8.

`wire_dtype="fp8"` of a named overlap, or `fp8_buf` of a reduce-scatter in mode FP8,
selects that. Sent rows are quantized to e4m3 with a power-of-two scale per row, which
travels with its row, and widened on arrival. A gathered array is rounded once. Each
rank's partial sums are rounded once, and added in f32, in rank order.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import dtypes, lowering_log, reference
from jax_ub._src.methods import DEFAULT_SPLITS, Method
from jax_ub._src.primitives import collectives, matmuls
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.scales import Operand, packed, unpacked
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.scaled_array import (
    ScaledArray,
    amax_of,
    cast,
    is_scaled,
    row_scales,
)


def all_gather(execution: Execution, x: Operand) -> Operand:
    """All-gathers the rows of x, which are sent as FP8 if so configured."""
    return widened(x, collectives.all_gather(execution, as_sent(execution, x)))


def bulk_all_gather(
    execution: Execution, dys: Any, ws: Any, x: Operand, **options: Any
) -> tuple[jax.Array, Operand]:
    """All-gathers x, sent as FP8 if so configured, concurrently with a dgrad GEMM."""
    rows = as_sent(execution, x)
    dx, gathered = collectives.bulk_all_gather(execution, dys, ws, rows, **options)
    return dx, widened(x, gathered)


def reduce_scatter(execution: Execution, x: jax.Array, *, out_dtype: Any) -> jax.Array:
    """Reduce-scatters the rows of x, which are sent as FP8 if so configured."""
    if not _sends_fp8(execution, x):
        return collectives.reduce_scatter(execution, x, out_dtype=out_dtype)
    with lowering_log.falling_back(
        execution.label, "its partial sums are sent as FP8, by XLA's all-to-all"
    ):
        quantized = _quantized(x)
        rows, _ = packed(quantized)
        sent = lax.bitcast_convert_type(rows, jnp.uint8).reshape(
            *x.shape[:-2], execution.num_ranks, -1, rows.shape[-1]
        )
        axis = x.ndim - 2
        received = lax.all_to_all(sent, execution.axis_name, axis, axis)
        received = lax.bitcast_convert_type(received, rows.dtype)
        partial: Any = unpacked(quantized, received)
        wide = reference.dequantize(partial.values, partial.scales)
        return jnp.sum(wide, axis).astype(out_dtype)


def sends_partial_sums(config: CallConfig, x: Operand) -> bool:
    """Returns whether a layer is a GEMM+RS that sends its partial sums as FP8."""
    return config.mode.op == "matmul_reduce_scatter" and _sends_fp8(
        _reducing(config), x
    )


def _reducing(config):
    return config.overlapped if config.overlap else config.collective


def matmul_reduce_scatter(
    config: CallConfig,
    xs: tuple[Operand, ...],
    ws: tuple[Operand, ...],
    bias: jax.Array | None,
    residual: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Computes `reduce_scatter(x @ w)`, with partial sums that are sent as FP8.

    "pipeline" has one GEMM and one all-to-all for each split of the columns, so that
    XLA may overlap them; the other methods have one of each.
    """
    execution = _reducing(config)
    num_splits = 1
    axis = 0 if options["rhs_transposed"] else 1
    num_columns = ws[0].shape[axis]
    pipelines = config.overlap and execution.choice.method is Method.PIPELINE
    if pipelines and not any(_has_blocks(w, axis) for w in ws):
        num_splits = min(execution.choice.num_splits or DEFAULT_SPLITS, num_columns)
    out_dtype = options.pop("out_dtype")
    is_sum = bias is None and residual is None
    bounds = [num_columns * i // num_splits for i in range(num_splits + 1)]
    parts = []
    for columns in itertools.pairwise(bounds):
        kernels = ws
        if num_splits > 1:
            kernels = tuple(_columns(w, *columns, axis) for w in ws)
        partial = matmuls.matmul(
            config.local, xs, kernels, out_dtype=jnp.float32, **options
        )
        sum_dtype = out_dtype if is_sum else jnp.float32
        parts.append(reduce_scatter(execution, partial, out_dtype=sum_dtype))
    y = parts[0] if num_splits == 1 else jnp.concatenate(parts, -1)
    return reference.add(y, bias, residual, out_dtype=out_dtype)


def _has_blocks(w, axis):
    """Returns whether an FP8 kernel has one scale per block of several columns."""
    return (
        is_scaled(w) and w.scales.ndim > 0 and 1 < w.scales.shape[axis] < w.shape[axis]
    )


def _columns(w, first, last, axis):
    """Returns columns [first, last) of a kernel, with their scales."""

    def cut(leaf):
        is_shared = leaf.ndim == 0 or leaf.shape[axis] == 1
        return leaf if is_shared else lax.slice_in_dim(leaf, first, last, axis=axis)

    return jax.tree.map(cut, w)


def _sends_fp8(execution, x):
    is_float = is_scaled(x) or x.dtype in dtypes.RESULTS
    return execution.choice.sends_fp8 and execution.num_ranks > 1 and is_float


def as_sent(execution: Execution, x: Operand) -> Operand:
    """Returns x as an all-gather sends it: quantized to FP8 if so configured."""
    if is_scaled(x) or not _sends_fp8(execution, x):
        return x
    return _quantized(x)


def _quantized(x):
    dtype = jnp.float8_e4m3fn
    scales = row_scales(amax_of(x, (-1,)), dtype)
    return ScaledArray(cast(x, scales, dtype), scales)


def widened(x: Operand, gathered: Any) -> Any:
    """Dequantizes all-gathered rows to the dtype of x if they were sent as FP8.

    The largest numbers of a dtype may be rounded up when they are quantized. They are
    clipped to the range of the dtype, so that they do not become infinite.
    """
    if is_scaled(x) or not is_scaled(gathered):
        return gathered
    rows = reference.dequantize(gathered.values, gathered.scales)
    largest = float(jnp.finfo(x.dtype).max)
    return jnp.clip(rows, -largest, largest).astype(x.dtype)
