"""Linear layers with FP8 operands, `ScaledArray`s.

If a recipe quantizes the layer's operands, it also quantizes the gradients of the
results, and the backward pass multiplies FP8 operands, too. If the caller has quantized
them, the backward pass multiplies the gradients by operands that are dequantized to the
dtype from which they were quantized. All-gathered operands and residuals are FP8.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src import checks as shapes
from jax_ub._src import dtypes
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    UnsupportedOverlapError,
)
from jax_ub._src.fp8.quantize import quantize_arrays, quantize_layer
from jax_ub._src.fp8.recipes import (
    INPUT,
    OUTPUT_GRAD,
    ROLES,
    check_recipe,
    has_one_scale,
)
from jax_ub._src.fp8.state import OUTPUT_GRAD_STATE, check_state
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_gather, all_reduce
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.column import column_gradients
from jax_ub._src.rules.forward import forward_of
from jax_ub._src.rules.row import is_partial, row_gradients
from jax_ub._src.rules.vjp import differentiable, save
from jax_ub._src.scaled_array import (
    MXFP8_BLOCK,
    ScaledArray,
    is_scaled,
    map_scaled,
    without_source,
)


def as_row(x: Any) -> Any:
    """Adds an axis of one row in front of a vector, or of an FP8 vector."""
    return jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, x)


def have_scales(label: str, **operands: Any) -> bool:
    """Returns True if all operands of a GEMM are FP8, False if none is.

    Raises:
        ShapeContractError: if only some are, or if one is FP8 without scales.
    """
    for name, operand in operands.items():
        if shapes.is_array(operand) and operand.dtype in dtypes.FP8:
            raise ShapeContractError(
                f"{label}: {name} is {operand.dtype} without scales. Pass ub.quantize("
                f"{name}, recipe), or ub.ScaledArray(values, scales)."
            )
    wide = [name for name, operand in operands.items() if not is_scaled(operand)]
    if len(wide) in (0, len(operands)):
        return not wide
    fp8 = next(name for name in operands if name not in wide)
    found = operands[wide[0]]
    dtype = found.dtype if shapes.is_array(found) else type(found).__name__
    raise ShapeContractError(
        f"{label}: {fp8} is FP8, {wide[0]} is {dtype}. Quantize both or neither."
    )


def by_name(x: Any, ws: tuple[Any, ...]) -> dict[str, Any]:
    """Returns a dict from the names that errors use, "x" and "w", to the operands."""
    names = ["w"] if len(ws) == 1 else [f"w[{i}]" for i in range(len(ws))]
    return {"x": x, **dict(zip(names, ws, strict=True))}


def result_dtype(x: Any, ws: tuple[Any, ...]) -> np.dtype:
    """Returns the default dtype of a layer's result: the dtype of x.

    For FP8 operands it is the dtype from which the first of them was quantized, or bf16
    if that is not known.
    """
    if not is_scaled(x):
        return x.dtype
    sources = [operand.source for operand in (x, *ws) if operand.source is not None]
    return sources[0].dtype if sources else jnp.dtype(jnp.bfloat16)


def with_dtypes(config: CallConfig, x: Any, ws: tuple, out_dtype) -> CallConfig:
    """Returns `config` with the dtypes of the operands, the result and the gradients.

    An `out_dtype` of None selects `result_dtype`.
    """
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
    """Checks scales and formats of a layer's FP8 operands.

    The caller checks that both have the same K.
    """
    label = config.label
    shapes.check_kernel(label, "w", w)
    shapes.check_not_empty(label, "x", x)
    x_axis, w_axis = _contracted_axes(config, x)
    _check_layout(label, "x", x, x_axis)
    _check_layout(label, "w", w, w_axis)
    check_formats(label, x=x, w=w)
    if config.num_ranks == 1 or config.mode.op == "matmul":
        return
    _check_agreed(config, "x", x, x_axis)
    if not config.mode.gathers_x:
        _check_agreed(config, "w", w, w_axis)


def check_formats(label: str, **operands: ScaledArray) -> None:
    """Raises an error if both operands of a GEMM are float8_e5m2."""
    if all(operand.dtype == jnp.float8_e5m2 for operand in operands.values()):
        raise ShapeContractError(
            f"{label}: {' and '.join(operands)} are both float8_e5m2, which no device "
            "multiplies. Make one of them float8_e4m3fn; for gradients use a HYBRID "
            "recipe."
        )


def _contracted_axes(config, x):
    return x.ndim - 1, 1 if config.rhs_transposed else 0


def _check_layout(label, name, operand, contracted):
    if operand.scaling == "tensor":
        return
    is_block = operand.scaling == "block"
    size = operand.shape[contracted] // MXFP8_BLOCK if is_block else 1
    wanted = _scales_shape(operand, contracted, size)
    if operand.scales.shape != wanted:
        kind = f"block of {MXFP8_BLOCK}" if is_block else "row or column"
        raise ShapeContractError(
            f"{label}: {name} has scales of shape {operand.scales.shape} for values "
            f"{operand.shape}, but one per {kind} has shape {wanted}, since "
            f"axis {contracted} is contracted. Quantize {name} with its role, such as "
            'role="kernel".'
        )


def _scales_shape(operand, contracted, size):
    """Returns the shape of scales with `size` scales along the contracted axis."""
    return (*operand.shape[:contracted], size, *operand.shape[contracted + 1 :])


def _is_per_row(operand, contracted):
    """Returns whether each row or column has its own scale.

    That is also the case for a scale per tensor if there is only one row or column.
    """
    return operand.scales.shape == _scales_shape(operand, contracted, 1)


def _check_agreed(config, name, operand, contracted):
    """Raises an error if one scale per tensor differs over ranks that share the tensor.

    Only `jax.shard_map(check_vma=True)` knows whether it differs.
    """
    differs = vma.axes_of(operand.scales) & frozenset(config.axis_name)
    if differs and operand.scaling == "tensor" and not _is_per_row(operand, contracted):
        raise ShapeContractError(
            f"{config.label}: {name} has one scale per tensor, which differs over "
            f"{tuple(sorted(differs))}. Pass axis_name to ub.quantize."
        )


def _check_ranks(config: CallConfig) -> None:
    """Raises an error if the ranks are an axis of `jax.vmap`.

    JAX differentiates such calls without the `custom_vjp`, which FP8 operands need.
    """
    if config.is_mapped:
        raise UnsupportedOverlapError(
            f"{config.label}: FP8 operands over {config.axis_name}, an axis of "
            "jax.vmap. Use jax.shard_map."
        )


def _with_scalar_scales(
    config: CallConfig, x: ScaledArray, ws: tuple[ScaledArray, ...]
) -> tuple[ScaledArray, tuple[ScaledArray, ...]]:
    """Reshapes each scale per tensor to a scalar, if it is the same on all ranks.

    If a scale of a gathered or contracted tensor may differ over the ranks, it keeps
    its shape, and belongs to the rows of its rank.
    """
    communicates = config.mode.op != "matmul"
    x_axis, w_axis = _contracted_axes(config, x)

    def scalar(operand, axis, is_shared):
        if operand.scaling != "tensor":
            return operand
        if is_shared and not _is_agreed(config, operand, axis):
            return operand
        return with_scalar_scale(operand)

    gathers = config.mode.gathers_x
    return scalar(x, x_axis, communicates), tuple(
        scalar(w, w_axis, communicates and not gathers) for w in ws
    )


def with_scalar_scale(operand: ScaledArray) -> ScaledArray:
    """Reshapes the only scale of an FP8 array to a scalar."""
    return ScaledArray(operand.values, operand.scales.reshape(()), operand.source)


def _is_agreed(config, operand, contracted):
    """Returns whether all ranks have the same scale.

    The scale of a single row or column may differ, unless a recipe has agreed on it.
    """
    if has_one_scale(config.fp8):
        return True
    is_one = not _is_per_row(operand, contracted)
    return is_one and not frozenset(config.axis_name) & vma.axes_of(operand.scales)


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
    state: dict[str, jax.Array] | None = None,
) -> tuple[tuple[jax.Array, ...], Any]:
    """Computes a linear layer of FP8 operands; see `forward.forward_of`.

    `state` is the state of the recipe that quantizes the gradients of the results.
    """
    return forward_of(config)(config, x, ws, biases, residual)


def scaled_gradients(
    config: CallConfig,
    saved: dict,
    dys: dict[int, Any],
    d_gathered: Any = None,
) -> tuple[ScaledArray | None, dict[int, Any], dict[str, jax.Array] | None]:
    """Computes the gradients of a layer of FP8 operands, and the new state.

    `vjp.differentiable` describes arguments and results. The gradient of an operand is
    that of its `source`, the array that was quantized. The gathered x has no source,
    and so no gradient.
    """
    gathers = config.mode.gathers_x
    new_state = None
    if config.fp8 is not None:
        if dys:
            dys, new_state = _quantized_gradients(config, dys, saved["state"])
    else:
        if gathers and saved["x"] is not None and dys:
            gathered = all_gather(config.collective, saved["x"])
            saved = {**saved, "x": None, "gathered": gathered}
        saved = map_scaled(lambda operand: operand.dequantize(config.dtype), saved)
    dx, dws = (column_gradients if gathers else row_gradients)(config, saved, dys)
    x_dtype, *w_dtypes = config.source_dtypes
    if saved["main_grads"] is None:
        dws = {i: _cotangent(dw, w_dtypes[i]) for i, dw in dws.items()}
    return _cotangent(dx, x_dtype), dws, new_state


def _quantized_gradients(config, dys, state):
    if config.mode.op == "matmul_all_reduce" and is_partial(config, dys[0]):
        dys = {0: all_reduce(config.collective, dys[0])}
    if any(map(is_scaled, dys.values())):
        return map_scaled(without_source, dys), None
    arrays, state = quantize_arrays(
        *(config.label, config.fp8, OUTPUT_GRAD, tuple(dys.values()), state),
        config.axis_name,
    )
    return dict(zip(dys, arrays, strict=True)), state


def quantized(
    config: CallConfig,
    x: Any,
    ws: tuple[Any, ...],
    state: Any,
    roles: Sequence[str] = ROLES,
) -> tuple[Any, tuple[Any, ...], tuple[dict[str, jax.Array] | None, ...]]:
    """Quantizes the operands of a layer by its recipe, if it has one.

    `roles` are those of the state. Without "input", x is FP8 already.

    Returns:
        x, the kernels, and the last operands of `scaled_linear`: the state for the
        gradients of the results, or None. They are () if the operands are not FP8.
    """
    label, recipe = config.label, config.fp8
    if recipe is None:
        if state is not None:
            raise ConfigurationError(
                f"{label}: fp8_state without fp8. Pass fp8=recipe, or leave out "
                "fp8_state."
            )
        if not is_scaled(x):
            return x, ws, ()
        _check_ranks(config)
        return *_with_scalar_scales(config, x, ws), (None,)
    check_recipe(label, recipe)
    of_x = config
    for name, operand in by_name(x, ws).items():
        if is_scaled(operand) and INPUT not in roles:
            # The operand's scales may be those of another recipe than `config.fp8`.
            of_x = dataclasses.replace(config, fp8=None)
            continue
        if is_scaled(operand):
            raise ShapeContractError(
                f"{label}: {name} is FP8 already, but fp8 = {type(recipe).__name__} "
                "quantizes it. Leave out fp8, or pass the array that was quantized."
            )
        shapes.check_float(label, **{name: operand})
    state = check_state(label, recipe, state, roles)
    x, ws = quantize_layer(
        label,
        recipe,
        x,
        ws,
        state,
        config.axis_name,
        rhs_transposed=config.rhs_transposed,
    )
    _check_ranks(config)
    x, _ = _with_scalar_scales(of_x, x, ())
    _, ws = _with_scalar_scales(config, x, ws)
    # The forward pass reads the named arrays, so that remat with a policy that keeps
    # them does not quantize again.
    x = _named(config, "x", x)
    ws = tuple(_named(config, "w", w) for w in ws)
    of_gradients = {key: state[key] for key in OUTPUT_GRAD_STATE if key in state}
    return x, ws, (of_gradients or None,)


def _named(config, name, operand):
    values, scales = save((operand.values, operand.scales), name, config.ub_name)
    return ScaledArray(values, scales, operand.source)


def _cotangent(gradient, source_dtype):
    """Returns the cotangent of a `ScaledArray`; None without gradient or source."""
    if gradient is None or source_dtype is None:
        return None
    return cotangent_of_scaled(gradient.astype(source_dtype))


def cotangent_of_scaled(gradient: jax.Array) -> ScaledArray:
    """Returns the cotangent of a `ScaledArray`: the gradient of its `source` alone."""
    return ScaledArray.tree_unflatten(None, (None, None, gradient))


scaled_linear = differentiable(scaled_forward, scaled_gradients)
