"""Linear layers of several dimensions, and several of them in one call."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jax_ub import shapes
from jax_ub.errors import ShapeContractError, shown
from jax_ub.retrofit.sharded_linear import as_matrix, sharded_linear, split_features
from jax_ub.retrofit.sharding_layout import ShardingLayout
from jax_ub.rules import main_grads as accumulators
from jax_ub.rules.fsdp import gather_kernels


def multiply_together(
    sharding_layout: ShardingLayout,
    inputs: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array] = (),
    main_grads: Sequence[jax.Array] = (),
    *,
    num_in: int = 1,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, ...]:
    """Multiplies the same inputs by several kernels; what is gathered is so once.

    Args:
        sharding_layout: the layout of all kernels, whose first in or out dimension is
            sharded.
        inputs: `[..., tokens, *in]`.
        kernels: `[*in, *out]`, of the dtype of the inputs.
        biases: `[*out]`, one for each kernel or none at all.
        main_grads: f32 `[*in, *out]`, one for each kernel or none at all.
        num_in: how many dimensions are contracted.
        residual: `[..., tokens, *out]` or None, added to the result of one kernel, of a
            row layer in its call, where it is rounded once.
        out_dtype: dtype of the products; None is that of the inputs. With a residual
            the result has the dtype that holds both.

    Returns:
        `[..., tokens, *out]` for each kernel.

    Raises:
        ShapeContractError: if the arrays do not fit each other or the mesh, or if a
            main_grad was handed to another call already.
    """
    shapes.check_array(sharding_layout.op, "x", inputs)
    if residual is not None:
        shapes.check_array(sharding_layout.op, "residual", residual)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not set(manual).isdisjoint(sharding_layout.fsdp_axes):
        operands = inputs, kernels, main_grads
        sharding_layout, kernels, main_grads = _gathered(
            sharding_layout, manual, *operands, num_in
        )
    mesh = (
        None
        if sharding_layout.is_local()
        else sharding_layout.find_mesh(*kernels, inputs)
    )
    for kernel in kernels:
        sharding_layout.check_contraction(inputs, kernel, num_in)
        if mesh is not None and kernel.ndim > 2:  # their matrix may divide all the same
            sharding_layout.check_features(
                (kernel.shape[0], kernel.shape[num_in]), mesh
            )
    lead = inputs.shape[: inputs.ndim - num_in]
    addend = None
    if residual is not None:
        _check_residual(sharding_layout, residual, lead, kernels[0].shape[num_in:])
    if residual is not None and sharding_layout.parallel == "row":
        out_dtype = jnp.result_type(out_dtype or inputs.dtype, residual)
        num_out = kernels[0].ndim - num_in
        addend = _flat(residual, num_out)
    for main_grad, kernel in zip(main_grads, kernels, strict=bool(main_grads)):
        if main_grad.ndim > 2:  # its matrix is another array in every call
            accumulators.claim(sharding_layout.op, main_grad, kernel)
    ys = sharded_linear(
        sharding_layout,
        _flat(inputs, num_in),
        _matrices(kernels, num_in),
        tuple(bias.reshape(-1) for bias in biases) or None,
        _matrices(main_grads, num_in) or None,
        residual=addend,
        out_dtype=out_dtype,
    )
    each = zip(ys, kernels, strict=True)
    results = tuple(split_features(y, w.shape[num_in:]) for y, w in each)
    if residual is None or addend is not None:
        return results
    return tuple(_add(y, residual) for y in results)


def multiply_promoted(
    sharding_layout: ShardingLayout,
    inputs: Sequence[jax.Array],
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    main_grads: Sequence[jax.Array],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Multiplies the same inputs by several kernels, in the dtype of each layer.

    Args:
        sharding_layout: the layout of all kernels.
        inputs: the inputs as each layer promoted them.
        kernels: one for each layer.
        biases: one for each layer or none at all.
        main_grads: one for each layer or none at all.
        **options: as of `multiply_together`.

    Returns:
        The results. Layers of one dtype share one gather.
    """
    if len({x.dtype for x in inputs}) == 1:
        arrays = (inputs[0], kernels, biases, main_grads)
        return multiply_together(sharding_layout, *arrays, **options)
    results: list[jax.Array] = []
    for i, x in enumerate(inputs):
        own = (each[i : i + 1] for each in (kernels, biases, main_grads))
        results += multiply_together(sharding_layout, x, *own, **options)
    return tuple(results)


def _gathered(sharding_layout, manual, inputs, kernels, main_grads, num_in):
    """Gathers kernels that the caller's own `shard_map` has cut for FSDP."""
    axes = tuple(name for name in sharding_layout.fsdp_axes if name in manual)
    for main_grad, kernel in zip(main_grads, kernels, strict=bool(main_grads)):
        accumulators.claim(
            sharding_layout.op, main_grad, kernel
        )  # the gathered is another
    dim = sharding_layout.fsdp_dim * num_in
    parts = tuple(kernels), tuple(main_grads)
    gathered = gather_kernels(inputs, *parts, axes=axes, dim=dim)
    others = tuple(name for name in sharding_layout.fsdp_axes if name not in manual)
    return dataclasses.replace(sharding_layout, fsdp_axes=others), *gathered


def _add(y, residual):
    """Adds a residual that may lie otherwise, which an explicit mesh would refuse."""
    sharding = jax.typeof(y).sharding
    if residual.shape == y.shape and AxisType.Explicit in sharding.mesh.axis_types:
        residual = jax.sharding.reshard(residual, sharding)
    return y + residual


def _flat(x, num_dims):
    """Makes one of the last dimensions; -1 would not know the size of empty ones."""
    lead = x.ndim - num_dims
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def _check_residual(sharding_layout, residual, lead, outs):
    """Refuses a residual of other features, or of other tokens than a row layer's."""
    # How many tokens a rank's own result has is known to the op, which checks them.
    is_whole = sharding_layout.parallel == "row" and not sharding_layout.is_local()
    wanted = (*lead, *outs) if is_whole else outs
    found = residual.shape if is_whole else residual.shape[-len(outs) :]
    if found != wanted:
        raise ShapeContractError(
            f"{sharding_layout.op}: residual has shape {residual.shape}, but the "
            f"result "
            f"{'has' if is_whole else 'ends in'} {wanted}. Pass a residual of the "
            "result's shape."
        )


def sizes_of(features: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of one or several dimensions."""
    return tuple(features) if isinstance(features, Sequence) else (features,)


def read_sizes(op: str, name: str, features: int | Sequence[int]) -> tuple[int, ...]:
    """The same, of what a layer is made with.

    Raises:
        ShapeContractError: if one is no positive integer, or there is none.
    """
    sizes = sizes_of(features)
    if not sizes or not all(map(shapes.is_size, sizes)):
        raise ShapeContractError(
            f"{op}: {name} = {shown(features)} is neither a positive integer nor "
            "several. Pass the global size, or a tuple with one for each dimension."
        )
    return sizes


def _matrices(kernels, num_in):
    return tuple(as_matrix(w, num_in) for w in kernels)
