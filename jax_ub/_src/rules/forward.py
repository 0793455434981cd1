"""Products of linear layers: AG+GEMM, GEMM+RS, GEMM+AR and GEMM; and collectives alone.

A layer's forward pass is one of the products, and its dgrad is another one, with
transposed kernels. With `config.overlap`, the GEMM and its collective are one
primitive. Without, they are two primitives, which run one after the other.

`wire_dtype="fp8"` of a named overlap, or `fp8_buf` of a reduce-scatter in mode FP8,
sends wide arrays as FP8. Sent rows are quantized to e4m3 with a power-of-two scale per
row, which travels with its row, and widened on arrival. A gathered array is rounded
once. Each rank's partial sums are rounded once, and added in f32, in rank order.
"""

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import checks, dtypes, lowering_log, reference
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.methods import DEFAULT_SPLITS, Method
from jax_ub._src.primitives import collectives, matmuls, vma
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.quantization import amax_of, cast
from jax_ub._src.primitives.scales import Operand, packed, unpacked
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.vjp import mapped_together, whole_kernels
from jax_ub._src.scaled_array import (
    ScaledArray,
    is_scaled,
    map_scaled,
    row_scales,
    with_scalar_scale,
)

# The reason that `ub.fallbacks` gives if partial sums are sent as FP8. Their GEMM then
# does not overlap with the communication.
BY_ALL_TO_ALL = "its partial sums are sent as FP8, by XLA's all-to-all"
# Lower bound of the amax (largest absolute value) of a row that is sent as e4m3. It
# keeps scales at or above 2^-126, the smallest normal f32 number.
_LEAST_SENT = 2.0**-118


def forward_of(config: CallConfig) -> Callable[..., Any]:
    return column_forward if config.mode.gathers_x else row_forward


def with_f64_fallback(
    config: CallConfig, x: Any
) -> tuple[CallConfig, AbstractContextManager[Any]]:
    """Selects plain `jax.lax` if x is f64, because the engine has no f64 GEMM.

    An explicit method is kept.

    Returns:
        The layer's settings, and a context manager that records the fallback, if any.
    """
    is_f64 = checks.is_array(x) and checks.is_f64(x)
    if is_f64 and config.may_fall_back and not config.takes_f64:
        return config.plain, lowering_log.falling_back(config.label, "x is float64")
    return config, contextlib.nullcontext()


def is_differentiated_by_jax(config: CallConfig, operands: Any, main_grads) -> bool:
    """Returns whether JAX differentiates a layer itself, without a `custom_vjp`.

    These are layers over an axis of `jax.vmap`, outside of which a backward rule might
    run, and layers in plain `jax.lax` outside of `shard_map`, for whose gradients JAX
    chooses the shardings on an explicit mesh. FP8 and `main_grad` need the
    `custom_vjp`.
    """
    if config.is_mapped and main_grads is not None:
        raise UnsupportedOverlapError(
            f"{config.label}: main_grad over {config.axis_name}, an axis of jax.vmap. "
            "Use jax.shard_map, or leave out main_grad."
        )
    if config.is_mapped:
        return True
    is_plain = config.takes_f64 and main_grads is None and not is_scaled(operands[0])
    return is_plain and vma.is_sharded(operands)


def column_forward(
    config: CallConfig,
    x: Operand,
    ws: tuple[Operand, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    *_: Any,
) -> tuple[tuple[jax.Array, ...], Operand | None]:
    """Computes `all_gather(x) @ w_i + bias_i + residual` for each kernel w_i.

    Without overlap, `ws` has only one kernel. If `jax.vmap` maps any operand, it maps
    all results, unless JAX itself differentiates the layer.

    Returns:
        The products `[..., M, N_i]`, and the gathered x if `config.returns_gathered`.
    """
    ws = _rank_kernels(config, ws)
    options = _options(config, config.out_dtype)
    if config.overlap:
        ys, gathered = matmuls.all_gather_matmul(
            config.overlapped,
            _as_sent(config.overlapped, x),
            ws,
            biases,
            None if residual is None else (residual,),
            return_gathered=config.returns_gathered,
            **options,
        )
        gathered = _widened(x, gathered)
    else:
        sent = _as_sent(config.collective, x)
        rows = _widened(x, collectives.all_gather(config.collective, sent))
        (bias,) = biases or (None,)
        ys = (matmuls.matmul(config.local, (rows,), ws, bias, residual, **options),)
        gathered = rows if config.returns_gathered else None
    if config.is_mapped or (len(ys) == 1 and gathered is None):
        return ys, gathered
    return mapped_together((ys, gathered), (x, ws, biases, residual))


def row_forward(
    config: CallConfig,
    x: Operand | tuple[Operand, ...],
    ws: tuple[Operand, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    *_: Any,
) -> tuple[tuple[jax.Array, ...], None]:
    """Computes `x @ w`, summed over the ranks if the layer is row-parallel.

    Bias and residual are added once, after the reduction. If x is a tuple with one
    array for each kernel, the products are added, too.
    """
    op, reducing = config.mode.op, config.collective
    ws = _rank_kernels(config, ws) if op == "matmul" else whole_kernels(config, ws)
    xs = x if isinstance(x, tuple) else (x,)
    (bias,) = biases or (None,)
    is_one_call = op == "matmul"
    if config.overlap:
        reducing = config.overlapped
        sends_fp8 = op == "matmul_reduce_scatter" and _sends_fp8(reducing, xs[0])
        is_one_call = not sends_fp8
    if is_one_call:
        product = {
            "matmul": matmuls.matmul,
            "matmul_reduce_scatter": matmuls.matmul_reduce_scatter,
            "matmul_all_reduce": matmuls.matmul_all_reduce,
        }[op]
        execution = config.local if op == "matmul" else reducing
        options = _options(config, config.out_dtype)
        return (product(execution, xs, ws, bias, residual, **options),), None
    options = _options(config, jnp.float32)
    if op == "matmul_all_reduce":
        partial = matmuls.matmul(config.local, xs, ws, **options)
        y = collectives.all_reduce(reducing, partial, bias, residual)
        return (y.astype(config.out_dtype),), None
    is_sum = bias is None and residual is None
    sum_dtype = config.out_dtype if is_sum else jnp.float32
    parts = []
    for kernels in _column_splits(config, reducing, ws):
        partial = matmuls.matmul(config.local, xs, kernels, **options)
        scatter = _scatter_of(reducing, partial)
        parts.append(scatter(reducing, partial, out_dtype=sum_dtype))
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)
    return (reference.add(y, bias, residual, out_dtype=config.out_dtype),), None


def _rank_kernels(config, ws):
    """Returns the kernels of one rank, and all-gathers those that FSDP shards.

    FP8 scales per tensor become scalars, because no GEMM also reads the kernels of
    other tensor-parallel ranks.
    """
    return map_scaled(with_scalar_scale, whole_kernels(config, ws))


def _options(config, out_dtype) -> dict[str, Any]:
    return {
        "rhs_transposed": config.rhs_transposed,
        "scale": config.scale,
        "out_dtype": out_dtype,
    }


def is_replicated(config: CallConfig, x: Any) -> bool:
    """Returns whether x has the same value on all ranks, according to its type.

    The result is False if the forward pass communicates.
    """
    if config.mode.op != "matmul" or not config.is_vma_checked:
        return False
    return not config.varying(x)


def all_gather(execution: Execution, x: Operand) -> Operand:
    """All-gathers the rows of x. The rows are sent as FP8 if so configured."""
    return _widened(x, collectives.all_gather(execution, _as_sent(execution, x)))


def bulk_all_gather(
    execution: Execution, dys: Any, ws: Any, x: Operand, **options: Any
) -> tuple[jax.Array, Operand]:
    """All-gathers x, as FP8 if so configured, concurrently with a dgrad GEMM."""
    rows = _as_sent(execution, x)
    dx, gathered = collectives.bulk_all_gather(execution, dys, ws, rows, **options)
    return dx, _widened(x, gathered)


def reduce_scatter(execution: Execution, x: jax.Array, *, out_dtype: Any) -> jax.Array:
    """Reduce-scatters the rows of x. The rows are sent as FP8 if so configured."""
    return _scatter_of(execution, x)(execution, x, out_dtype=out_dtype)


def _scatter_of(execution, x):
    return _scatter_fp8 if _sends_fp8(execution, x) else collectives.reduce_scatter


def _scatter_fp8(execution, x, *, out_dtype):
    """Reduce-scatters x: an all-to-all sends rows as FP8, which are added in f32."""
    with lowering_log.falling_back(execution.label, BY_ALL_TO_ALL):
        quantized = _quantized(execution, x)
        rows, _ = packed(quantized)
        sent = lax.bitcast_convert_type(rows, jnp.uint8).reshape(
            *x.shape[:-2], execution.num_ranks, -1, rows.shape[-1]
        )
        axis = x.ndim - 2
        received = lax.all_to_all(sent, execution.axis_name, axis, axis)
        received = lax.bitcast_convert_type(received, rows.dtype)
        partial: Any = unpacked(quantized, received)
        return jnp.sum(_dequantized(partial, jnp.float32), axis).astype(out_dtype)


def _column_splits(
    config: CallConfig, reducing: Execution, ws: tuple[Operand, ...]
) -> list[tuple[Operand, ...]]:
    """Splits kernels by columns into parts whose products are reduced separately.

    With overlap, "pipeline" splits the columns, so that XLA may overlap the GEMM of one
    part with the collective of another part. Otherwise there is one part.
    """
    axis = 1 - config.contracted_dim
    num_columns = ws[0].shape[axis]
    pipelines = config.overlap and reducing.choice.method is Method.PIPELINE
    if not pipelines or any(_has_blocks(w, axis) for w in ws):
        return [ws]
    num_splits = min(reducing.choice.num_splits or DEFAULT_SPLITS, num_columns)
    bounds = [num_columns * i // num_splits for i in range(num_splits + 1)]
    return [
        tuple(_columns(w, *columns, axis) for w in ws)
        for columns in itertools.pairwise(bounds)
    ]


def _has_blocks(w, axis):
    """Returns whether an FP8 kernel has one scale for each block of columns."""
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


def _as_sent(execution: Execution, x: Operand) -> Operand:
    """Returns x as an all-gather sends it: quantized to FP8 if so configured."""
    if is_scaled(x) or not _sends_fp8(execution, x):
        return x
    return _quantized(execution, x)


def _quantized(execution, x):
    dtype = jnp.float8_e4m3fn
    scales = row_scales(amax_of(execution, x, (-1,)), dtype, least=_LEAST_SENT)
    return ScaledArray(cast(execution, x, scales, dtype), scales)


def _widened(x: Operand, gathered: Any) -> Any:
    """Dequantizes all-gathered rows to the dtype of x if they were sent as FP8."""
    if is_scaled(x) or not is_scaled(gathered):
        return gathered
    return _dequantized(gathered, x.dtype)


def _dequantized(received, dtype):
    """Dequantizes rows that were sent as FP8 to their original dtype, `dtype`.

    The largest numbers of a dtype may be rounded up when they are quantized. They are
    clipped to the range of the dtype, so that they do not become infinite.
    """
    rows = reference.dequantize(received.values, received.scales)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(rows, -largest, largest).astype(dtype)
