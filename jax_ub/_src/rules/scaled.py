"""Linear layers with FP8 operands, `ScaledArray`s.

If a recipe quantizes the layer's operands, it also quantizes the gradients of the
results, and the backward pass multiplies FP8 operands, too. If the caller has quantized
them, the backward pass multiplies the gradients, in the dtype from which the operands
were quantized, by the FP8 operands. Where the engine cannot, the operands are
dequantized to this dtype first. All-gathered operands and residuals are FP8.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    UnsupportedOverlapError,
)
from jax_ub._src.fp8.quantize import quantize_arrays, quantize_layer
from jax_ub._src.fp8.recipes import (
    INPUT,
    KERNEL,
    OUTPUT_GRAD,
    ROLES,
    MXFP8BlockScaling,
    check_layer_recipe,
    has_one_scale,
)
from jax_ub._src.fp8.state import (
    OUTPUT_GRAD_STATE,
    check_state,
    claim_layer_state,
)
from jax_ub._src.parallel import COLUMN
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_gather, all_reduce
from jax_ub._src.rules.backward import column_gradients, is_partial, row_gradients
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.forward import column_forward, row_forward
from jax_ub._src.rules.operands import by_name, check_scaled, is_per_row
from jax_ub._src.rules.vjp import differentiable, save, whole_kernels
from jax_ub._src.scaled_array import (
    MXFP8_BLOCK,
    ScaledArray,
    cotangent_of_scaled,
    is_scaled,
    map_scaled,
    with_scale_of_shape,
    without_source,
)


def _with_scalar_scales(
    config: CallConfig,
    x: ScaledArray,
    ws: tuple[ScaledArray, ...],
    *,
    is_x_agreed: bool = False,
    is_w_agreed: bool = False,
) -> tuple[ScaledArray, tuple[ScaledArray, ...]]:
    """Reshapes per-tensor FP8 scales to scalars, unless they may differ between ranks.

    If a scale of a gathered or contracted tensor may differ, all its sizes are 1, and
    it belongs to the rows or columns of its rank. An operand is agreed if a recipe has
    made its scale equal on all ranks.
    """

    def reshaped(operand, differs):
        if operand.scaling != "tensor":
            return operand
        return with_scale_of_shape(operand, (1,) * operand.ndim if differs else ())

    # Returns whether the scale of an FP8 operand differs between ranks. With
    # `check_vma=True`, the type of the scale shows it. Without these types, the result
    # is the assumption `is_assumed`.
    def differs(operand, is_assumed):
        if config.is_vma_checked:
            return bool(config.varying(operand.scales))
        return is_assumed

    def w_differs(w):
        # On CPUs, the dgrad of a column-parallel layer is one GEMM over the kernels of
        # all ranks, which may have different scales. On GPUs, each rank multiplies only
        # by its own kernel.
        is_column = config.mode.parallel == COLUMN
        if is_w_agreed or not has_peers or (is_column and config.is_on_cuda):
            return False
        return differs(w, is_column or is_per_row(w, config.contracted_dim))

    has_peers = config.num_ranks > 1
    may_differ = has_peers and config.mode.op != "matmul" and not is_x_agreed
    x_differs = may_differ and differs(x, is_per_row(x, x.ndim - 1))
    return reshaped(x, x_differs), tuple(reshaped(w, w_differs(w)) for w in ws)


def scaled_gradients(
    config: CallConfig,
    saved: dict,
    dys: dict[int, Any],
    d_gathered: Any = None,
    residual: jax.Array | None = None,
) -> tuple[ScaledArray | None, dict[int, Any], dict[str, jax.Array] | None]:
    """Computes the gradients of a layer with FP8 operands, and its new FP8 state.

    `vjp.differentiable` describes arguments and results. The gradient of an operand is
    that of its `source`, the array that was quantized. The gathered x has no source,
    and so no gradient. `residual` is an addend of the gradient of x.
    """
    gathers = config.mode.gathers_x
    new_state = None
    if config.fp8 is not None:
        if dys:
            dys, new_state = _quantized_gradients(config, dys, saved["state"])
    else:
        saved = _dequantized(config, saved, gathers_x=gathers and bool(dys))
    gradients = column_gradients if gathers else row_gradients
    dx, dws = gradients(config, saved, dys, residual=residual)
    x_dtype, *w_dtypes = config.source_dtypes
    if saved["main_grads"] is None:
        dws = {i: _cotangent(dw, w_dtypes[i]) for i, dw in dws.items()}
    return _cotangent(dx, x_dtype), dws, new_state


def _dequantized(config, saved, gathers_x):
    """Dequantizes saved FP8 operands that the engine cannot multiply by a non-FP8 dy.

    `gathers_x` is whether the kernel gradients need rows of x from other ranks. The
    rows are then gathered before x is dequantized.
    """
    x, gathered, ws = (saved[name] for name in ("x", "gathered", "ws"))
    if gathers_x and is_scaled(x) and not _multiplies_wide(config, x):
        gathered = all_gather(config.collective, x)
        x = None

    def factor(operand):
        keeps = _multiplies_wide(config, operand)
        return operand if keeps else operand.dequantize(config.dtype)

    x, gathered = map_scaled(factor, (x, gathered))
    # The dgrad is one GEMM that reads all kernels, so they must have the same dtype.
    kernels = ws or ()
    has_one_dtype = len({w.dtype for w in kernels}) <= 1
    keeps = all(_multiplies_wide(config, w, is_kernel=True) for w in kernels)
    if not (has_one_dtype and keeps):
        ws = tuple(w.dequantize(config.dtype) for w in kernels)
    return {**saved, "x": x, "gathered": gathered, "ws": ws}


def _multiplies_wide(config, operand, is_kernel=False):
    """Returns whether the engine can multiply an FP8 operand by one that is not FP8.

    cuBLASLt does not. The scales of rows may change along the dimension that a gradient
    contracts, and the engine would multiply them by the FP8 values with one rounding,
    which is exact only for powers of two. It multiplies the only scale of a rank's
    kernel by the f32 sums.
    """
    has_one = operand.scaling == "tensor" if is_kernel else operand.scales.ndim == 0
    return has_one and not config.is_on_cuda


def _quantized_gradients(config, dys, state):
    if config.mode.op == "matmul_all_reduce" and is_partial(config, dys[0]):
        dys = {0: all_reduce(config.collective, dys[0])}
    if any(map(is_scaled, dys.values())):
        return map_scaled(without_source, dys), None
    arrays, state = quantize_arrays(
        config.collective, config.fp8, OUTPUT_GRAD, tuple(dys.values()), state
    )
    return dict(zip(dys, arrays, strict=True)), state


def quantized(
    config: CallConfig,
    x: Any,
    ws: tuple[Any, ...],
    state: Any,
    roles: Sequence[str] = ROLES,
) -> tuple[Any, tuple[Any, ...], tuple[dict[str, jax.Array] | None, ...]]:
    """Quantizes a layer's operands to FP8 by its recipe, `config.fp8`.

    Without a recipe, all operands are FP8 already. `roles` are the roles for which the
    state has scales. If "input" is not one of them, x is FP8 already. Kernels may be
    FP8 already, too; then their state does not change.

    Returns:
        x, the kernels, and the last operands of the layer's function: the state for the
        gradients of the results, or None.
    """
    label, recipe = config.label, config.fp8
    if recipe is None and state is not None:
        raise ConfigurationError(
            f"{label}: fp8_state without fp8. Pass fp8=recipe, or leave out fp8_state."
        )
    if config.is_mapped:
        # Calls over an axis of `jax.vmap` have no `custom_vjp`, which the gradients of
        # FP8 operands need.
        raise UnsupportedOverlapError(
            f"{label}: FP8 operands over {config.axis_name}, an axis of jax.vmap. Use "
            "jax.shard_map."
        )
    if recipe is None:
        return *_with_scalar_scales(config, x, ws), (None,)
    check_layer_recipe(label, recipe)
    # The caller may have quantized the kernels, to use them in several calls.
    given = ws if all(map(is_scaled, ws)) else ()
    wide = by_name(x, () if given else ws)
    if INPUT not in roles:
        # x is FP8 already. It is not quantized here, so the checks below do not apply:
        # its recipe may be another one, and its scales may differ between ranks.
        del wide["x"]
    for name, operand in wide.items():
        if is_scaled(operand):
            raise ShapeContractError(
                f"{label}: {name} is FP8 already, but fp8 = {type(recipe).__name__} "
                "quantizes it. Leave out fp8, or pass the array that was quantized."
            )
        shapes.check_float(label, **{name: operand})
    state = claim_layer_state(label, state, ws, roles)
    state = check_state(label, recipe, state, roles, argument="fp8_state")
    x, ws = quantize_layer(
        config.collective,
        recipe,
        x,
        () if given else ws,
        state,
        rhs_transposed=config.rhs_transposed,
        shards=config.shards,
    )
    ws = given or ws
    for w in given:
        _check_given_kernel(config, x, w)
    has_one = has_one_scale(recipe)
    x, ws = _with_scalar_scales(
        config,
        x,
        ws,
        is_x_agreed=has_one and INPUT in roles,
        is_w_agreed=has_one and not given,
    )
    # The forward pass reads the arrays that `checkpoint_name` returns. If a policy of
    # `jax.checkpoint` saves these, the backward pass does not quantize the operands
    # again.
    x = _named(config, "x", x)
    ws = tuple(_named(config, "w", w) for w in ws)
    of_gradients = {key: state[key] for key in OUTPUT_GRAD_STATE if key in state}
    return x, ws, (of_gradients or None,)


def _check_given_kernel(config, x, w):
    """Raises an error if a kernel that the caller quantized does not fit the recipe."""
    dtype = config.fp8.fp8_format.dtype(KERNEL)
    if w.dtype != dtype:
        raise ShapeContractError(
            f"{config.label}: w is {w.dtype}, but kernels of "
            f"{type(config.fp8).__name__} are {dtype}. Quantize w with role="
            '"kernel".'
        )
    check_scaled(config, x, w)


def with_whole_blocks(
    config: CallConfig, x: Any, ws: tuple[Any, ...]
) -> tuple[CallConfig, tuple[Any, ...]]:
    """All-gathers kernels whose FSDP shards would split blocks of 32 values (MXFP8).

    These kernels are gathered before they are quantized, and all other kernels
    afterwards.

    Returns:
        The layer's settings and kernels.
    """
    shards = config.shards
    is_mxfp8 = isinstance(config.fp8, MXFP8BlockScaling)
    if shards is None or not is_mxfp8 or is_scaled(ws[0]):
        return config, ws
    has_whole_blocks = ws[0].shape[shards.dim] % MXFP8_BLOCK == 0
    if has_whole_blocks or shards.dim != config.contracted_dim:
        return config, ws
    # Without the cast, JAX would sum the gradients of whole kernels over the other
    # replicas before the gradients are reduce-scattered.
    ws = vma.pcast_varying(ws, vma.axes_of(x))
    return dataclasses.replace(config, shards=None), whole_kernels(config, ws)


def _named(config, name, operand):
    values, scales = save((operand.values, operand.scales), name, config.ub_name)
    return ScaledArray(values, scales, operand.source)


def _cotangent(gradient, source_dtype):
    """Returns the cotangent of a `ScaledArray`: the gradient, in the source's dtype.

    Returns None if there is no gradient, or no source: the array that was quantized.
    """
    if gradient is None or source_dtype is None:
        return None
    return cotangent_of_scaled(gradient.astype(source_dtype))


column_linear = differentiable(column_forward, scaled_gradients)
row_linear = differentiable(row_forward, scaled_gradients)
