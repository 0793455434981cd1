"""Partition specs of a layer's operands, and the mesh axes in them.

| parallel | x | kernel | bias | y |
|---|---|---|---|---|
| "column" | `[data, tp, -]` | `[-, tp]` | `[tp]` | `[data, -, tp]` |
| "row" | `[data, -, tp]` | `[tp, -]` | `[-]` | `[data, tp, -]` |
| None | `[data, tp, -]` | `[-, -]` | `[-]` | `[data, tp, -]` |

`data` stands for the data axes. It is omitted if they do not divide the leading axis.
Without sequence parallelism no token axis is sharded over `tp`. A layer that is not
parallel does not shard tokens over `tp` either if `tp` does not divide them. If x is
`[tokens, features]`, its tokens are sharded over `(data..., tp)`.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ub._src.checks import axis_tuple, round_up
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.scaled_array import ScaledArray
from jax_ub._src.sharding.layout import AnyMesh, ShardingLayout


def nontrivial_axes(mesh: AnyMesh, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the mesh axes among `names` that have more than one rank."""
    return tuple(name for name in names if mesh.shape[name] > 1)


def batch_axes(layout: ShardingLayout, mesh: AnyMesh, x: jax.Array) -> tuple[str, ...]:
    """Returns the mesh axes that shard the leading axis of x and of the result.

    If x is sharded over the same ranks already, they are the axes of x's type, in its
    order and with axes of one rank. Otherwise the result's type could differ from the
    type of x on an explicit mesh.
    """
    axes = data_axes(layout, mesh, x.shape)
    names = axis_tuple(jax.typeof(x).sharding.spec[0])
    others = {*mesh.shape} - {*layout.axes}
    typed = tuple(name for name in names if name in others)
    is_same = {*nontrivial_axes(mesh, typed)} == {*nontrivial_axes(mesh, axes)}
    return typed if typed and is_same and layout.data_axes is None else axes


def data_axes(
    layout: ShardingLayout, mesh: AnyMesh, x_shape: Sequence[int]
) -> tuple[str, ...]:
    """Returns the data-parallel mesh axes, which shard the leading axis of x.

    There are none if they do not divide its size, unless the caller named them.
    Explicit axes of one rank are included.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = mesh.axis_names if layout.data_axes is None else layout.data_axes
    layout.check_data_axes(mesh)
    axes = tuple(
        name
        for name in names
        if name not in layout.axes
        and name not in manual
        and (mesh.shape[name] > 1 or name in mesh.explicit_axes)
    )
    if layout.data_axes is not None:
        return axes
    # If x is [tokens, features], sequence parallelism shards its leading axis over the
    # tensor-parallel axis, too.
    has_both = len(x_shape) == 2 and layout.sequence_parallel
    num_tp = layout.axis_size(mesh) if has_both else 1
    num_data = math.prod(mesh.shape[name] for name in axes)
    return axes if x_shape[0] % (num_data * num_tp) == 0 else ()


def indivisible_reason(
    layout: ShardingLayout, mesh: AnyMesh, x_shape: Sequence[int]
) -> str | None:
    """Returns why the ranks cannot divide x [..., tokens, K] evenly, or None."""
    axes = nontrivial_axes(mesh, data_axes(layout, mesh, x_shape))
    num_data = math.prod(mesh.shape[name] for name in axes)
    num_tp = layout.axis_size(mesh) if layout.sequence_parallel else 1
    num_parts = num_tp * num_data if len(x_shape) == 2 else num_tp
    if x_shape[-2] % num_parts:
        padded = round_up(x_shape[-2], num_parts)
        return (
            f"x {tuple(x_shape)} has {x_shape[-2]} tokens (axis -2), which do not "
            f"divide into {num_parts} ranks. Pad to {padded} tokens, or use "
            "sequence_parallel=False."
        )
    if len(x_shape) > 2 and x_shape[0] % num_data:
        return (
            f"x {tuple(x_shape)} has a leading axis of {x_shape[0]}, which does not "
            f"divide into the {num_data} ranks of data_axes = {axes}. Pass other "
            "data_axes, or data_axes=()."
        )
    return None


def activation_specs(
    layout: ShardingLayout, batch: tuple[str, ...], ndim: int
) -> tuple[P, P]:
    """Returns the partition specs of x and y, both `[..., tokens, features]`.

    Both have `ndim` dimensions. `batch` are the mesh axes that shard the leading axis.
    """
    lead = [batch, *[None] * (ndim - 3)] if ndim > 2 else []
    over_data = batch if ndim == 2 else ()

    def spec(by_tokens, by_features):
        tokens = (*over_data, *(layout.axes if by_tokens else ()))
        return P(*lead, tokens, layout.axis_name if by_features else None)

    return spec(*layout.mode.x), spec(*layout.mode.y)


def spec_over(spec: P, axes: Collection[str]) -> P:
    """Returns a copy of a `PartitionSpec` that keeps only the mesh axes in `axes`."""
    return P(*(tuple(n for n in axis_tuple(entry) if n in axes) for entry in spec))


def free_axes(op: str, mesh: AnyMesh) -> dict[str, Any]:
    """Returns `jax.shard_map` arguments that make all remaining mesh axes manual.

    If the mesh has manual axes, it is the mesh of the enclosing `shard_map`.
    """
    check_context(op, mesh)
    context = jax.sharding.get_abstract_mesh()
    return {
        "mesh": None if mesh == context else mesh,
        "axis_names": set(mesh.axis_names) - set(context.manual_axes),
    }


def mapped_reason(mesh: AnyMesh) -> str | None:
    """Returns why `jax.vmap` prevents a `shard_map` over all mesh axes, or None."""
    if not mesh.explicit_axes:
        return None
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh if context.empty else context
    axes = set(mesh.axis_names) - set(context.manual_axes)
    empty = jax.shard_map(
        lambda: (), mesh=mesh, in_specs=(), out_specs=(), axis_names=axes
    )
    try:
        jax.eval_shape(empty)  # JAX does not tell which axes are mapped
    except ValueError:
        return (
            "jax.vmap maps a dimension that an explicit mesh axis shards, and JAX "
            "excludes this axis from jax.shard_map inside"
        )
    return None


def check_context(op: str, mesh: AnyMesh) -> None:
    """Raises an error if the mesh of `jax.set_mesh` has other axes or sizes."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context.shape_tuple != mesh.shape_tuple:
        raise ShapeContractError(
            f"{op}: mesh = {dict(mesh.shape)} differs from the mesh of jax.set_mesh, "
            f"{dict(context.shape)}. Leave mesh= out, or set the same mesh."
        )


def of_scaled(array: ScaledArray, spec: P) -> Any:
    """Returns the specs of an FP8 array and its scales, which are sharded alike.

    The scales are not sharded along dimensions in which they do not change.
    """
    sizes = zip(spec, array.scales.shape, strict=False)
    of_scales = P(*(None if size == 1 else entry for entry, size in sizes))
    return ScaledArray.tree_unflatten(None, (spec, of_scales, spec))


def reshard(mesh: AnyMesh, specs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Reshards each tree of arrays to its specs, as explicit mesh axes require.

    `shard_map` reshards its operands over automatic axes by itself, but rejects
    operands that are sharded differently over explicit axes.
    """
    if not mesh.explicit_axes:
        return list(operands)

    def resharded(spec, arrays):
        sharding = NamedSharding(mesh, spec_over(spec, mesh.explicit_axes))
        return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), arrays)

    # One spec applies to all arrays of the subtree at its position.
    return [
        jax.tree.map(resharded, spec, operand)
        for spec, operand in zip(specs, operands, strict=True)
    ]
