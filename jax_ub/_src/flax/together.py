"""Multiplies the same inputs by several kernels, which may have any rank."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.rules import main_grads as accumulators
from jax_ub._src.rules.fsdp import gather_kernels
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.sharded_linear import (
    as_matrix,
    sharded_linear,
    split_features,
)


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
    """Multiplies the same inputs by several kernels, gathering the inputs only once.

    Args:
        sharding_layout: the sharding layout of all kernels. It shards the first input
            or the first output dimension.
        inputs: `[..., tokens, *in]`.
        kernels: `[*in, *out]`, with the dtype of the inputs.
        biases: `[*out]` for each kernel, or empty.
        main_grads: f32 `[*in, *out]` for each kernel, or empty.
        num_in: the number of contracted dimensions.
        residual: `[..., tokens, *out]` or None; only with a single kernel. A row layer
            adds it inside its fused call, before rounding.
        out_dtype: dtype of the products; None takes the dtype of the inputs. With a
            residual, the result has the common dtype of product and residual.

    Returns:
        `[..., tokens, *out]` for each kernel.

    Raises:
        ShapeContractError: if the shapes do not match each other or the mesh, or if a
            main_grad was already passed to another call.
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
        # Checks heads before flattening: the number of ranks may divide the flat size
        # heads * head_dim even if it does not divide the heads.
        if mesh is not None and kernel.ndim > 2:
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
        # Claims the caller's array, because reshaping creates a new array.
        if main_grad.ndim > 2:
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
    """Multiplies the same inputs by several kernels, each in its layer's dtype.

    Args:
        sharding_layout: the sharding layout of all kernels.
        inputs: the inputs after dtype promotion, one array for each layer.
        kernels: one kernel for each layer.
        biases: one bias for each layer, or empty.
        main_grads: one main_grad for each layer, or empty.
        **options: keyword arguments of `multiply_together`.

    Returns:
        One result for each layer. If all layers have the same dtype, they share one
        gather.
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
    """All-gathers kernels over the FSDP axes of the caller's `shard_map`."""
    axes = tuple(name for name in sharding_layout.fsdp_axes if name in manual)
    for main_grad, kernel in zip(main_grads, kernels, strict=bool(main_grads)):
        accumulators.claim(
            sharding_layout.op, main_grad, kernel
        )  # the caller's array: gathering creates a new one
    dim = sharding_layout.fsdp_dim * num_in
    parts = tuple(kernels), tuple(main_grads)
    gathered = gather_kernels(inputs, *parts, axes=axes, dim=dim)
    others = tuple(name for name in sharding_layout.fsdp_axes if name not in manual)
    return dataclasses.replace(sharding_layout, fsdp_axes=others), *gathered


def _add(y, residual):
    """Adds a residual to a result; on an explicit mesh, reshards it first like `y`."""
    sharding = jax.typeof(y).sharding
    if residual.shape == y.shape and AxisType.Explicit in sharding.mesh.axis_types:
        residual = jax.sharding.reshard(residual, sharding)
    return y + residual


def _flat(x, num_dims):
    """Merges the last `num_dims` dimensions of an array into one.

    Computes the size, because reshape cannot infer -1 for empty arrays.
    """
    lead = x.ndim - num_dims
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def _check_residual(sharding_layout, residual, lead, outs):
    """Checks that a residual has the shape of the result that it is added to.

    Raises:
        ShapeContractError: if its features, or its tokens for a row layer with global
            arrays, differ from the result's.
    """
    # Inside shard_map, the number of tokens per rank is checked by the op itself.
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
    """Converts an integer or a sequence of sizes to a tuple of sizes."""
    return tuple(features) if isinstance(features, Sequence) else (features,)


def read_sizes(op: str, name: str, features: int | Sequence[int]) -> tuple[int, ...]:
    """Converts an integer or a sequence of sizes to a tuple, after checking them.

    Raises:
        ShapeContractError: if it is empty, or a size is not a positive integer.
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
