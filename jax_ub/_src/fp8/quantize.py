"""`quantize`: converts arrays to FP8 by a recipe."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import arguments, checks, dtypes, methods
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.fp8.recipes import (
    INPUT,
    KERNEL,
    OUTPUT_GRAD,
    ROLES,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    RowwiseScaling,
    check_recipe,
    current_scale,
    updated_history,
    updated_scale,
)
from jax_ub._src.fp8.state import check_state, claim_state, names_of
from jax_ub._src.methods import MethodChoice
from jax_ub._src.parallel import KernelShards
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.collectives import all_reduce_max
from jax_ub._src.primitives.quantization import amax_of, amax_of_blocks, cast
from jax_ub._src.runtime import settings
from jax_ub._src.scalars import is_integer
from jax_ub._src.scaled_array import (
    MXFP8_BLOCK,
    ScaledArray,
    block_scales,
    is_scaled,
    row_scales,
)

_OP = "quantize"


def quantize(
    x: jax.Array,
    recipe: Recipe | None = None,
    *,
    role: str = "input",
    state: Mapping[str, jax.Array] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> ScaledArray:
    """Converts an array to FP8 values, with scales that an FP8 recipe determines.

    Values are divided by their scales in f32, clipped to the range of the FP8 dtype,
    and rounded once, to nearest even. A NaN stays a NaN, and an infinity becomes the
    largest number. `source` of the result is `x`, and its gradient is the gradient of
    `x`. Values and scales have none, so the gradient of `ScaledArray.dequantize` is
    zero.

    With `DelayedScaling`, the scale comes from `state`, and the gradient of the state
    is its new value, which `ub.fp8.apply_updates` stores. Inside
    `jax.shard_map(check_vma=True)` a state may be the same on all ranks. With
    `check_vma=False` JAX sums the gradients of replicated arguments. In that case
    differentiate inside the `jax.shard_map`, or give each rank a separate state.

    Transformer Engine: the quantizers of `transformer_engine.pytorch.tensor`.

    Args:
        x: activations `[..., M, K]`, a kernel `[K, N]`, or gradients `[..., M, N]`.
        recipe: the recipe; None takes `ub.fp8.Float8CurrentScaling()`.
        role: "input", "kernel" or "output_grad". It selects the format, the contracted
            dimension (-2 of a kernel, else -1), and the entries of the state. A kernel
            that is stored as `[out, in]` has the contracted dimension of an "input".
        state: state of `DelayedScaling`, from `ub.fp8.init_state`.
        axis_name: the mesh axes whose ranks share a scale per tensor: those over which
            the tensor is gathered (x of a column-parallel layer) or contracted (x and
            kernel of a row-parallel layer). Recipes with a scale per row or block
            ignore it.

    Returns:
        The quantized array.

    Raises:
        ConfigurationError: if `recipe` is not a recipe, or does not match `state`.
        ShapeContractError: if `x` is not an f32, bf16 or f16 array, if MXFP8 blocks do
            not divide its contracted dimension, or if an axis of `axis_name` is not
            manual here.
        UnknownNameError: if there is no such role.
    """
    recipe = Float8CurrentScaling() if recipe is None else recipe
    check_recipe(_OP, recipe)
    if not isinstance(role, str) or role not in ROLES:
        raise UnknownNameError(
            f"{_OP}: role = {shown(role)} is not a role. {nearest(role, ROLES)}"
        )
    checks.check_rank(_OP, "x", x, 2 if role == KERNEL else 1)
    checks.check_float(_OP, x=x)
    checks.check_not_empty(_OP, "x", x)
    execution = execution_over(_OP, axis_name)
    state = claim_state(_OP, state, (role,))
    state = check_state(_OP, recipe, state, argument="state")
    if isinstance(recipe, DelayedScaling):
        return _delayed_arrays(execution, recipe, role, (x,), state)[0]
    return _quantized(execution, recipe, role, x)


def execution_over(op: str, axis_name: str | tuple[str, ...] | None) -> Execution:
    """Returns an `Execution` for the ranks along `axis_name`, which share an FP8 scale.

    The axes may also be axes of `jax.vmap`. If `axis_name` is None, each rank has its
    own scale.
    """
    num_ranks = 1
    if axis_name is not None:
        num_ranks = mesh.axis_size(op, axis_name, may_be_mapped=True)
    return Execution(
        label=op,
        choice=MethodChoice(methods.resolve(op, None, settings.method())),
        axis_name=checks.axis_tuple(axis_name),
        num_ranks=num_ranks,
    )


def quantize_layer(
    execution: Execution,
    recipe: Recipe,
    x: Any,
    ws: tuple[jax.Array, ...],
    state: Mapping[str, jax.Array],
    *,
    rhs_transposed: bool,
    shards: KernelShards | None,
) -> tuple[ScaledArray, tuple[ScaledArray, ...]]:
    """Quantizes a layer's kernels, if any, and its activations unless already FP8.

    All ranks of `execution` have the same scale per tensor. For current scaling, one
    collective reduces the amax of x and of the kernels. Several kernels share a scale,
    as if they were the fused kernel of a Transformer Engine layer. Shards of a kernel
    get the scales of the whole kernel. MXFP8 shards must consist of whole blocks.
    """
    xs = () if is_scaled(x) else (x,)
    if not xs and not ws:
        return x, ()
    axes = () if shards is None else shards.axes
    if isinstance(recipe, DelayedScaling):
        qs = _delayed_arrays(execution, recipe, INPUT, xs, state)
        return (*qs, x)[0], _delayed_arrays(execution, recipe, KERNEL, ws, state, axes)
    if not isinstance(recipe, Float8CurrentScaling):
        role, contracted = (INPUT, 1) if rhs_transposed else (KERNEL, 0)
        if shards is not None and shards.dim != contracted:
            axes = ()
        qs = tuple(_quantized(execution, recipe, INPUT, x) for x in xs)
        return (*qs, x)[0], tuple(
            _quantized(execution, recipe, role, w, axes) for w in ws
        )
    maxima = [_maximum_over(axes, _amax_of_all(execution, ws))] if ws else []
    if xs:
        maxima.append(_amax_of_all(execution, xs))
    amax = _agreed_maxima(execution, maxima)
    if xs:
        scale_of_x = current_scale(amax[-1], recipe, INPUT)
        x = _cast(execution, recipe, INPUT, x, _like(scale_of_x, x))
    scale_of_ws = current_scale(amax[0], recipe, KERNEL)
    return x, tuple(
        _cast(execution, recipe, KERNEL, w, _like(scale_of_ws, w)) for w in ws
    )


def quantize_arrays(
    execution: Execution,
    recipe: Recipe,
    role: str,
    xs: tuple[jax.Array, ...],
    state: Mapping[str, jax.Array],
) -> tuple[tuple[ScaledArray, ...], dict[str, jax.Array] | None]:
    """Quantizes several arrays to FP8. With a scale per tensor, all arrays share it.

    It is not differentiable.

    Returns:
        The arrays without sources, and the new state; None without a state.
    """
    if isinstance(recipe, DelayedScaling):
        names = names_of(role)
        old = tuple(state[key] for key in names)
        (values, scale), saved = _delayed(execution, recipe, role, (), xs, *old)
        arrays = tuple(ScaledArray(v, scale.reshape(())) for v in values)
        return arrays, dict(
            zip(names, _new_state(execution.label, *saved), strict=True)
        )
    if isinstance(recipe, Float8CurrentScaling):
        amax = _agreed(execution, _amax_of_all(execution, xs))
        scale = current_scale(amax, recipe, role).reshape(())
        scales = [scale] * len(xs)
    else:
        scales = [_scales(execution, recipe, role, x) for x in xs]
    dtype = recipe.fp8_format.dtype(role)
    pairs = zip(xs, scales, strict=True)
    return tuple(ScaledArray(cast(execution, x, s, dtype), s) for x, s in pairs), None


def _like(scale, x):
    return scale.reshape((1,) * x.ndim)


def _quantized(execution, recipe, role, x, axes=(), contracted=None):
    scales = _scales(execution, recipe, role, x, axes, contracted)
    return _cast(execution, recipe, role, x, scales)


def _cast(execution, recipe, role, x, scales):
    dtype = recipe.fp8_format.dtype(role)
    return ScaledArray(cast(execution, x, scales, dtype), scales, x)


def _amax_of_all(execution, xs):
    """Returns the largest absolute value in several arrays, as an f32 scalar."""
    maxima = [amax_of(execution, x).reshape(()) for x in xs]
    return functools.reduce(
        jnp.maximum, vma.pcast_varying(maxima, vma.axes_of(*maxima))
    )


def _delayed_arrays(execution, recipe, role, xs, state, axes=()):
    """Returns `ScaledArray`s with one common scale, computed from an amax history.

    They may be shards over the mesh axes `axes`.
    """
    if not xs:
        return ()
    old = tuple(state[name] for name in names_of(role))
    sources = tuple(map(lax.stop_gradient, xs))
    values, scale = _quantize_delayed(execution, recipe, role, axes, sources, *old)
    pairs = zip(values, xs, strict=True)
    return tuple(ScaledArray(v, _like(scale, x), x) for v, x in pairs)


def _scales(execution, recipe, role, x, axes=(), contracted=None):
    """Returns the FP8 scales of x, for recipes that do not use earlier steps.

    `axes` are the mesh axes that shard the contracted dimension of a kernel (FSDP).
    `contracted` are the contracted dimensions; None takes the one of the role.
    """
    dtype = recipe.fp8_format.dtype(role)
    if contracted is None:
        contracted = (-2,) if role == KERNEL else (-1,)
    if isinstance(recipe, MXFP8BlockScaling):
        axis = contracted[-1]
        size = x.shape[axis]
        if size % MXFP8_BLOCK:
            name = "N" if role == OUTPUT_GRAD else "K"
            raise ShapeContractError(
                f"{execution.label}: {name} = {size} is no multiple of {MXFP8_BLOCK}, "
                f"which MXFP8 needs. Pad {name}, or use Float8CurrentScaling."
            )
        return block_scales(amax_of_blocks(execution, x, axis), dtype, recipe.margin)
    if isinstance(recipe, RowwiseScaling):
        return row_scales(_maximum_over(axes, amax_of(execution, x, contracted)), dtype)
    amax = _agreed(execution, amax_of(execution, x))
    return current_scale(amax, recipe, role)


def _agreed(execution, amax):
    """Returns the elementwise maximum of `amax` over ranks that share an FP8 scale."""
    axes = _varying_axes(execution, amax)
    if axes and axes == execution.axis_name:
        return all_reduce_max(execution, amax)
    return _maximum_over(axes, amax)


def _maximum_over(axes, amax):
    """Returns the elementwise maximum over the ranks of the mesh axes `axes`."""
    return lax.pmax(amax, axes) if axes else amax


def _agreed_maxima(execution, maxima):
    """Computes the maxima of scalar amaxes over the ranks, in a single collective."""
    return _agreed(
        execution, jnp.stack(vma.pcast_varying(maxima, vma.axes_of(*maxima)))
    )


def _varying_axes(execution, amax):
    """Returns the mesh axes over which an amax differs, among those of `execution`."""
    axes = execution.axis_name
    if axes and vma.is_vma_checked(axes):
        # If a tensor does not vary over an axis, all ranks along this axis already have
        # the same amax.
        axes = tuple(axis for axis in axes if axis in vma.axes_of(amax))
    return axes


def _further_axes(execution, recipe, xs, *state):
    """Returns the mesh axes over which arrays vary, but not their shared FP8 state.

    The axes of `execution` are not included.
    """
    varying = vma.axes_of(*xs) - vma.axes_of(*state)
    missing = tuple(sorted(varying.difference(execution.axis_name)))
    # Along an axis with one rank, the amax cannot differ.
    differs = tuple(axis for axis in missing if lax.axis_size(axis) > 1)
    if differs and not recipe.reduce_amax:
        raise ConfigurationError(
            f"{execution.label}: with reduce_amax = False the amax differs over "
            f"{differs}, but the state is the same there. Use reduce_amax=True, or "
            "call the op in jax.shard_map and give each rank its own state in front of "
            "jax.grad: "
            f"jax.lax.pcast(state, {differs}, to='varying')."
        )
    return missing


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _quantize_delayed(execution, recipe, role, axes, xs, scale, history):
    """Quantizes arrays with one scale, computed from the amaxes of earlier steps.

    Its `custom_vjp` returns the new scale and history as the gradients of the old ones.

    Returns:
        The values of each array, and the scale, `[1]`.
    """
    return _delayed(execution, recipe, role, axes, xs, scale, history)[0]


def _delayed(execution, recipe, role, axes, xs, scale, history):
    """Forward rule of `_quantize_delayed`. It also returns residuals.

    Returns:
        (values, scale), and the arguments of `_new_state`: scale, history and amax.
    """
    further = _further_axes(execution, recipe, xs, scale, history)
    further += tuple(axis for axis in axes if axis not in further)
    scale = updated_scale(history, scale, recipe, role)
    dtype = recipe.fp8_format.dtype(role)
    values = tuple(cast(execution, x, _like(scale, x), dtype) for x in xs)
    amax = _amax_of_all(execution, xs)
    # XLA reduces the amax, not the engine. Only the next step reads the amax, so XLA
    # can combine the reductions for all tensors and layers in one collective.
    amax = _maximum_over((*_varying_axes(execution, amax), *further), amax)
    return (values, scale), (scale, history, amax)


def _new_state(label, scale, history, amax):
    """Returns the new FP8 state: scale, and amax history including this step's amax.

    If `jax.vmap` maps the tensor, it must map the history, too. Otherwise JAX would sum
    the new states of all mapped indices.
    """

    def text(size):
        return (
            f"{label}: jax.vmap maps x but not its FP8 state, and JAX would add the "
            f"new states of {size} examples. Put the examples into batch axes of x, in "
            "front of its rows, without jax.vmap; or map the state, too."
        )

    history = checks.mapped_with(history, amax, text)
    return scale, updated_history(history, amax.reshape(1))


def _delayed_backward(execution, recipe, role, axes, saved, _):
    return None, *_new_state(execution.label, *saved)


_quantize_delayed.defvjp(_delayed, _delayed_backward)


def quantize_params(
    params: Any,
    recipe: Recipe | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    select: Callable[[Any, Any], bool | int] | None = None,
) -> Any:
    """Quantizes the kernels in a tree of parameters to FP8, once per step.

    Call it in front of a loop over microbatches: the loop then reads one byte per
    element, and gradients accumulate in the parameters, which are the `source` of the
    results. One collective reduces the maxima of all kernels over the ranks.

    Transformer Engine: `is_first_microbatch`, with which a module quantizes its weights
    once per step.

    Args:
        params: a tree of arrays, with kernels `[in, out]` or `[*in, *out]`.
        recipe: the recipe; None takes `ub.fp8.Float8CurrentScaling()`.
        axis_name: the mesh axes whose ranks share a scale per tensor; see
            `ub.quantize`.
        select: a function of the key path and the array that returns whether to
            quantize it, or for a kernel `[*in, *out]` the number of its contracted
            dimensions `in`: 1 for `[in, heads, head_dim]`, 2 for `[heads, head_dim,
            out]`. Recipes with a scale per row or block need the number for kernels of
            more than two dimensions: scales of columns then have the shape `[1, ..., 1,
            *out]`, and blocks are along the last of the dimensions `in`. None selects
            the floating-point arrays of two dimensions.

    Returns:
        The tree, with a `ub.ScaledArray` in place of each selected array. Those that
        are in the tree already stay.

    Raises:
        ConfigurationError: if `recipe` is not a recipe.
        ShapeContractError: if `select` is not a function, its result does not fit a
            kernel, or a selected array is not a kernel; see `ub.quantize`.
        UnsupportedOverlapError: for `DelayedScaling`, whose state each kernel needs.
    """
    op = "quantize_params"
    recipe = Float8CurrentScaling() if recipe is None else recipe
    check_recipe(op, recipe)
    if select is not None:
        arguments.check_function(op, "select", select)
    if isinstance(recipe, DelayedScaling):
        raise UnsupportedOverlapError(
            f"{op}: DelayedScaling needs a state for each kernel. Quantize each one by "
            "ub.quantize(w, recipe, role='kernel', state=state), or use "
            "Float8CurrentScaling."
        )
    paths, tree = jax.tree_util.tree_flatten_with_path(params, is_scaled)
    selects = _is_matrix if select is None else select
    leaves = [leaf for _, leaf in paths]
    names, contracted = {}, {}
    for i, (path, leaf) in enumerate(paths):
        answer = not is_scaled(leaf) and selects(path, leaf)
        if answer:
            names[i] = name = f"params{jax.tree_util.keystr(path)}"
            checks.check_rank(op, name, leaf)
            checks.check_float(op, **{name: leaf})
            checks.check_not_empty(op, name, leaf)
            label = f"{op}: {name}"
            contracted[i] = _contracted_dims(label, recipe, leaf.shape, answer)
    if names and axis_name is not None and isinstance(recipe, Float8CurrentScaling):
        execution = execution_over(op, axis_name)
        maxima = _agreed_maxima(
            execution, [_amax_of_all(execution, (leaves[i],)) for i in names]
        )
        scales = current_scale(maxima, recipe, KERNEL)
        for i, scale in zip(names, scales, strict=True):
            leaves[i] = _cast(
                execution, recipe, KERNEL, leaves[i], _like(scale, leaves[i])
            )
    else:
        for i, name in names.items():
            execution = execution_over(f"{op}: {name}", None)
            leaves[i] = _quantized(
                execution, recipe, KERNEL, leaves[i], contracted=contracted[i]
            )
    return jax.tree.unflatten(tree, leaves)


def _contracted_dims(label, recipe, shape, answer):
    """Returns the contracted dimensions of a kernel from the answer of `select`."""
    if not is_integer(answer):
        if len(shape) > 2 and not isinstance(recipe, Float8CurrentScaling):
            raise ShapeContractError(
                f"{label} has shape {shape}, and {type(recipe).__name__} needs the "
                "number of its contracted dimensions. Return it from select: 1 for "
                "[in, heads, head_dim], 2 for [heads, head_dim, out]. Map stacked "
                "kernels by jax.vmap."
            )
        return (-2,)
    if not 0 < answer < len(shape):
        raise ShapeContractError(
            f"{label} has shape {shape}, but select returned {answer} contracted "
            f"dimensions. Return a number from 1 to {len(shape) - 1}."
        )
    last = shape[answer - 1]
    if answer > 1 and isinstance(recipe, MXFP8BlockScaling) and last % MXFP8_BLOCK:
        raise ShapeContractError(
            f"{label} has shape {shape}, whose last contracted dimension, {last}, is "
            f"no multiple of {MXFP8_BLOCK}, which MXFP8 needs. Do not select it, so "
            "that the layer quantizes it, or use RowwiseScaling."
        )
    return tuple(range(answer))


def _is_matrix(path, leaf):
    return checks.is_array(leaf) and leaf.ndim == 2 and leaf.dtype in dtypes.RESULTS
