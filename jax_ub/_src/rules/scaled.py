"""Linear layers with FP8 operands, `ScaledArray`s.

The forward pass multiplies FP8 values, and multiplies the f32 sums by the scales. The
backward pass multiplies the gradient of the result, which is not quantized, by operands
that are dequantized to the dtype of their sources. All-gathered operands and residuals
are FP8.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src import checks as shapes
from jax_ub._src import lowering_log, reference
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.fp8.scaled_array import (
    MXFP8_BLOCK,
    ScaledArray,
    is_scaled,
    map_scaled,
)
from jax_ub._src.methods import Method
from jax_ub._src.primitives import vma
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.column import column_gradients
from jax_ub._src.rules.row import row_gradients
from jax_ub._src.rules.vjp import differentiable

_NO_ENGINE = "the engine has no GEMM of FP8 operands"


def values_of(tree: Any) -> Any:
    """Replaces each `ScaledArray` of a tree by its FP8 values."""
    return map_scaled(lambda operand: operand.values, tree)


def have_scales(label: str, x: Any, ws: tuple[Any, ...]) -> bool:
    """Returns whether x and all kernels are FP8, rather than none of them.

    Raises:
        ShapeContractError: if only some are.
    """
    operands = {"x": x, **dict(zip(_names(ws), ws, strict=True))}
    wide = [name for name, operand in operands.items() if not is_scaled(operand)]
    if len(wide) in (0, len(operands)):
        return not wide
    fp8 = next(name for name in operands if name not in wide)
    found = operands[wide[0]]
    dtype = found.dtype if shapes.is_array(found) else type(found).__name__
    raise ShapeContractError(
        f"{label}: {fp8} is FP8, {wide[0]} is {dtype}. Quantize both or neither."
    )


def _names(ws):
    return ["w"] if len(ws) == 1 else [f"w[{i}]" for i in range(len(ws))]


def result_dtype(x: Any, ws: tuple[Any, ...]) -> np.dtype:
    """Returns the default dtype of the result: that of x, or of the first source.

    It is bf16 if no FP8 operand has a source.
    """
    if not is_scaled(x):
        return x.dtype
    sources = [operand.source for operand in (x, *ws) if operand.source is not None]
    return sources[0].dtype if sources else jnp.dtype(jnp.bfloat16)


def with_dtypes(config: CallConfig, x: Any, ws: tuple, out_dtype) -> CallConfig:
    """Returns a layer's settings with the dtypes of its operands and gradients."""
    config = config.with_dtypes(result_dtype(x, ws), out_dtype)
    if not is_scaled(x):
        return config
    x_dtype, *w_dtypes = (
        None if operand.source is None else operand.source.dtype for operand in (x, *ws)
    )
    known = [dtype for dtype in w_dtypes if dtype is not None]
    return dataclasses.replace(
        config,
        source_dtypes=(x_dtype, *w_dtypes),
        dw_dtype=jnp.result_type(*known) if known else None,
    )


def check_operands(config: CallConfig, x: ScaledArray, w: ScaledArray) -> None:
    """Checks FP8 operands of a layer, except that both have the same K."""
    label = config.label
    shapes.check_kernel(label, "w", w)
    shapes.check_not_empty(label, "x", x)
    _check_layout(label, "x", x, x.ndim - 1)
    _check_layout(label, "w", w, 1 if config.rhs_transposed else 0)
    if x.dtype == w.dtype == jnp.float8_e5m2:
        raise ShapeContractError(
            f"{label}: x and w are both float8_e5m2, which no device multiplies. Make "
            "one of them float8_e4m3fn; for gradients use a HYBRID recipe."
        )
    if config.num_ranks == 1 or config.mode.op == "matmul":
        return
    _check_agreed(config, "x", x)
    if not config.mode.gathers_x:
        _check_agreed(config, "w", w)


def _check_layout(label, name, operand, contracted):
    if operand.scaling == "tensor":
        return
    is_block = operand.scaling == "block"
    wanted = list(operand.shape)
    wanted[contracted] = wanted[contracted] // MXFP8_BLOCK if is_block else 1
    if operand.scales.shape != tuple(wanted):
        kind = f"block of {MXFP8_BLOCK}" if is_block else "row or column"
        raise ShapeContractError(
            f"{label}: {name} has scales of shape {operand.scales.shape} for values "
            f"{operand.shape}, but one per {kind} has shape {tuple(wanted)}, since "
            f"axis {contracted} is contracted. Quantize {name} with its role, such as "
            'role="kernel".'
        )


def _check_agreed(config, name, operand):
    """Raises an error if one scale per tensor differs over ranks that share the tensor.

    Only `jax.shard_map(check_vma=True)` knows whether it differs.
    """
    differs = vma.axes_of(operand.scales) & frozenset(config.axis_name)
    if differs and operand.scaling == "tensor" and not _has_row_scales(operand):
        raise ShapeContractError(
            f"{config.label}: {name} has one scale per tensor, which differs over "
            f"{tuple(sorted(differs))}. Pass axis_name to ub.quantize."
        )


def _has_row_scales(operand):
    """Returns whether each row has its own scales; also if there is only one row."""
    scales = operand.scales
    return bool(scales.ndim) and scales.shape[-2] == operand.shape[-2]


def fallback(config: CallConfig) -> contextlib.AbstractContextManager:
    """Returns a scope for the forward pass, which records that it is plain `jax.lax`.

    Raises:
        UnsupportedOverlapError: if the method is explicit, or if the ranks are an axis
            of `jax.vmap`, where JAX itself would differentiate the call.
    """
    if config.is_mapped:
        raise UnsupportedOverlapError(
            f"{config.label}: FP8 operands over {config.axis_name}, an axis of "
            "jax.vmap. Use jax.shard_map."
        )
    if config.method is Method.XLA:
        return contextlib.nullcontext()
    if not config.choice.may_fall_back:
        raise UnsupportedOverlapError(
            f'{config.label}: method "{config.method.value}" cannot run: {_NO_ENGINE}. '
            'Pass method="auto", which falls back to plain jax.lax, or method="xla".'
        )
    return lowering_log.falling_back(config.label, _NO_ENGINE)


def pcast_varying(tree: Any, axes: Any) -> Any:
    """Casts operands to vary over mesh axes, except scales, which have no gradient.

    The scales of a returned `ScaledArray` therefore keep their type.
    """

    def cast(operand):
        if not is_scaled(operand):
            return vma.pcast_varying(operand, axes)
        values, source = vma.pcast_varying((operand.values, operand.source), axes)
        return ScaledArray(values, operand.scales, source)

    return jax.tree.map(cast, tree, is_leaf=is_scaled)


def scaled_forward(
    config: CallConfig,
    x: ScaledArray,
    ws: tuple[ScaledArray, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    main_grads: tuple[jax.Array, ...] | None = None,
) -> tuple[tuple[jax.Array, ...], ScaledArray | None]:
    """Computes a linear layer of FP8 operands; see `forward.forward_of`."""
    if config.mode.gathers_x:
        x = _gathered(config, x)
    ys = []
    for i, w in enumerate(ws):
        y = _product(config, x, w)
        if config.mode.op == "matmul_reduce_scatter":
            y = reference.reduce_scatter(y, config.axis_name)
        elif config.mode.op == "matmul_all_reduce":
            y = reference.all_reduce(y, config.axis_name)
        bias = None if biases is None else biases[i]
        ys.append(reference.add(y, bias, residual, out_dtype=config.out_dtype))
    return tuple(ys), x if config.returns_gathered else None


def _gathered(config, x):
    """All-gathers the FP8 rows of x, with the scales of the rows if each has its own.

    A scale per tensor is the same on all ranks.
    """
    values, scales = x.values, x.scales
    if _has_row_scales(x):
        scales = vma.pcast_varying(scales, vma.axes_of(values))
        scales = reference.all_gather(scales, config.axis_name)
    return ScaledArray(reference.all_gather(values, config.axis_name), scales)


def _product(config, x, w):
    """Multiplies x by w: sums in f32, multiplied by the scales.

    Block scales change along K, so they multiply the values before the product. bf16
    holds the results exactly.
    """
    pairs = [
        (operand.dequantize(jnp.bfloat16), None)
        if operand.scaling == "block"
        else (operand.values, operand.scales)
        for operand in (x, w)
    ]
    (x, x_scales), (w, w_scales) = pairs
    y = reference.dot(x, w, rhs_transposed=config.rhs_transposed)
    if x_scales is not None:
        y = y * reference.with_rank(x_scales, y.ndim)
    if w_scales is not None:
        is_column = config.rhs_transposed and w_scales.ndim
        w_scales = w_scales.T if is_column else w_scales
        y = y * reference.with_rank(w_scales, y.ndim)
    return y


def scaled_gradients(
    config: CallConfig,
    saved: dict,
    dys: dict[int, jax.Array],
    d_gathered: Any = None,
) -> tuple[ScaledArray | None, dict[int, Any]]:
    """Computes the gradients of FP8 operands, in their sources.

    The arguments are those of `vjp.differentiable`. The gathered x has no source, and
    so no gradient.
    """
    gathers = config.mode.gathers_x
    if gathers and saved["x"] is not None and dys:
        saved = {**saved, "x": None, "gathered": _gathered(config, saved["x"])}
    saved = map_scaled(lambda operand: operand.dequantize(config.dtype), saved)
    dx, dws = (column_gradients if gathers else row_gradients)(config, saved, dys)
    x_dtype, *w_dtypes = config.source_dtypes
    if saved["main_grads"] is None:
        dws = {i: _in_source(dw, w_dtypes[i]) for i, dw in dws.items()}
    return _in_source(dx, x_dtype), dws


def _in_source(gradient, dtype):
    """Returns the cotangent of a `ScaledArray`: a gradient in its source, or None."""
    if gradient is None or dtype is None:
        return None
    leaves = None, None, gradient.astype(dtype)
    return ScaledArray.tree_unflatten(None, leaves)


scaled_linear = differentiable(scaled_forward, scaled_gradients)
