"""Finds the ranks of a call: their number when traced, devices when lowered."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_ub._src.checks import axis_tuple, check_axis_name, has_symbolic_sizes
from jax_ub._src.errors import (
    ShapeContractError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.communicators import DeviceGroups, rank_groups

# Part of error messages: how to run a call as plain `jax.lax`. Ops without an argument
# `method` need the environment variable.
RUN_PLAIN = 'pass method="xla" or set JAX_UB_METHOD=xla'
# Part of the error message about an axis name that is not in scope.
NOT_MANUAL = "is not a manual mesh axis"


def axis_size(
    op: str, axis_name: str | tuple[str, ...] | None, *, may_be_mapped: bool = False
) -> int:
    """Returns the number of ranks on `axis_name`, after checking that it is manual.

    With `may_be_mapped`, an axis of `jax.vmap` is accepted, too. Only plain `jax.lax`
    can communicate over one.
    """
    check_axis_name(op, axis_name)
    axes = axis_tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    missing = [axis for axis in axes if axis not in manual]
    if missing and _are_bound(axes):
        if may_be_mapped:
            return lax.axis_size(axes)
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)} {NOT_MANUAL}, but an axis of "
            "jax.vmap, over which only plain jax.lax communicates. Call it inside "
            f"jax.shard_map over all mesh axes, or {RUN_PLAIN}."
        )
    if manual and missing and missing[0] not in mesh.axis_names:
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)}, but the mesh of this jax.shard_map "
            f"has no axis {shown(missing[0])}. {nearest(missing[0], mesh.axis_names)}"
        )
    if missing:
        here = f"only {tuple(manual)} are" if manual else "no axis is manual here"
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)} {NOT_MANUAL}; {here}. "
            "Call it inside jax.shard_map over all mesh axes, for example "
            "jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)."
        )
    return lax.axis_size(axes)


def _are_bound(axes):
    try:
        lax.axis_size(axes)
    except NameError:
        return False
    return True


def are_manual(axes: tuple[str, ...]) -> bool:
    """Returns whether all `axes` are manual, as in a `shard_map` over them."""
    return set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def are_mapped(axes: tuple[str, ...]) -> bool:
    """Returns whether an enclosing `jax.vmap` has an axis with one of these names.

    Such an axis hides a mesh axis of an outer `shard_map`. The result is False inside a
    `jax.jit` that `jax.vmap` maps, which is only known later.
    """
    sizes = []

    @custom_vmap
    def same(indices):
        return indices

    @same.def_vmap
    def same_of_mapped(axis_size, is_mapped, indices):
        sizes.append(axis_size)
        return indices, is_mapped[0]

    same([lax.axis_index(axis) for axis in axes])
    return bool(sizes)


def refuse_hidden_axes(label: str, axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Returns x, or raises an error if `jax.vmap` maps x over an axis named in `axes`.

    A `custom_vjp` needs this check around plain `jax.lax`: the forward rule would
    communicate over the axis of `jax.vmap`, but the gradient would be that of ranks of
    the mesh axis. Unlike `are_mapped`, the check also finds the axis if `jax.vmap` maps
    a `jax.jit`. It adds nothing to the compiled program.
    """
    return _refuse_hidden_axes_p.bind(x, label=label, axes=axes)


def _batch_unless_hidden(axis_data, operands, dims, *, label, axes):
    if axis_data.name in axes:
        raise hidden_axis_error(label, axis_data.name)
    return _refuse_hidden_axes_p.bind(*operands, label=label, axes=axes), *dims


_refuse_hidden_axes_p = Primitive("jax_ub_refuse_hidden_axes")
_refuse_hidden_axes_p.def_impl(
    functools.partial(xla.apply_primitive, _refuse_hidden_axes_p)
)
_refuse_hidden_axes_p.def_abstract_eval(lambda x, *, label, axes: x)
batching.fancy_primitive_batchers[_refuse_hidden_axes_p] = _batch_unless_hidden
mlir.register_lowering(_refuse_hidden_axes_p, lambda ctx, x, *, label, axes: [x])
ad.deflinear2(_refuse_hidden_axes_p, lambda dy, _, *, label, axes: [dy])


def hidden_axis_error(label: str, axis: str) -> ShapeContractError:
    """Returns the error for an axis of `jax.vmap` that hides a mesh axis."""
    return ShapeContractError(
        f"{label}: axis_name = {shown(axis)} is an axis of jax.vmap here, which hides "
        "the mesh axis of this name. Give the axis of jax.vmap another name."
    )


def is_fully_manual(axes: tuple[str, ...]) -> bool:
    """Returns whether `axes`, and all other mesh axes of size above 1, are manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return are_manual(axes) and not _automatic_axes(mesh, mesh.manual_axes)


def has_local_arrays(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether the operands of a lowering are whole arrays on one device.

    XLA then does not partition them over devices.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return not _automatic_axes(context.mesh, context.manual_axes)
    return getattr(context, "num_devices", None) == 1


def check_manual(label: str, operands: Sequence[jax.core.ShapedArray]) -> None:
    """Raises an error in a `shard_map` that is manual over only some mesh axes.

    Called while the call is traced. Axes of one device may be automatic. Outside any
    `shard_map` only operands on an explicit mesh show that the program runs on several
    devices; the lowering checks it for the others.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        _refuse_automatic_axes(mesh, mesh.manual_axes, label)
        return
    for sharding in (operand.sharding for operand in operands):
        if any(sharding.spec) and sharding.mesh.size > 1:
            _refuse_devices(sharding.mesh.size, label)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The devices that run a lowered call, by rank, or why the engine cannot run it."""

    # Global device ids: table[group * P + rank], with P ranks per group. Empty if the
    # op communicates nothing. If the mesh is abstract, `table` and `ids` contain XLA's
    # partition ids instead.
    table: tuple[int, ...] = ()
    reason: str | None = None  # why the engine cannot run the call; None if it can
    spans_processes: bool = False  # whether a group has ranks in several processes
    groups: tuple[tuple[jax.Device, ...], ...] = ()  # devices, groups[group][rank]
    ids: tuple[int, ...] = ()  # ids of all devices of the mesh, in mesh order
    generation: int = 0  # generation of the communicators; 0 if there are none
    # All devices of the mesh. Empty if there is no mesh or it is abstract.
    devices: tuple[jax.Device, ...] = ()


def find_ranks(
    ctx: mlir.LoweringRuleContext,
    label: str,
    axes: tuple[str, ...],
    *,
    takes_partitions: bool = False,
) -> Ranks:
    """Returns the devices along `axes` of the mesh for which a call is lowered.

    With `takes_partitions`, the engine can find a rank by partition id, so that an
    abstract mesh is sufficient in a single process.
    """
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        num_devices = getattr(context, "num_devices", None)
        if num_devices != 1:
            _refuse_devices(num_devices, label)
        return Ranks()
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh = context.mesh
    _refuse_automatic_axes(mesh, context.manual_axes, label)
    if any(map(has_symbolic_sizes, ctx.avals_in)):
        # jaxlib may crash if a custom call has symbolic sizes. `Ranks.reason` makes the
        # lowering rule use plain JAX instead.
        return Ranks(
            reason="it is exported with symbolic sizes, and inside jax.shard_map XLA "
            "cannot find the sizes of a custom call; export it once for each size"
        )
    is_abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    devices = () if is_abstract else tuple(mesh.devices.flat)
    if not axes:
        return Ranks(devices=devices)
    if is_abstract:
        if takes_partitions and jax.process_count() == 1:
            # An abstract mesh has no device ids. They are replaced by XLA's partition
            # ids, which are the positions of devices in the mesh.
            ids = tuple(range(math.prod(mesh.axis_sizes)))
            groups = rank_groups(mesh, axes, ids)
            return Ranks(tuple(itertools.chain(*groups)), ids=ids)
        return Ranks(
            reason="it is lowered for an abstract mesh, which names no devices; pass "
            "jax.shard_map(mesh=...) or jax.set_mesh a concrete jax.sharding.Mesh"
        )
    by_id = {device.id: device for device in devices}
    groups = rank_groups(mesh, axes, tuple(by_id))
    process_of = {i: device.process_index for i, device in by_id.items()}
    platform, *_ = ctx.platforms or ctx.module_context.platforms
    device_groups = DeviceGroups(groups, process_of, jax.process_index(), platform)
    return Ranks(
        tuple(itertools.chain(*groups)),
        communicators.reason(device_groups),
        device_groups.any_spans_processes,
        tuple(tuple(by_id[i] for i in group) for group in groups),
        tuple(by_id),
        communicators.generation(device_groups),
        devices=devices,
    )


def _automatic_axes(mesh, manual_axes):
    return [
        axis
        for axis, size in mesh.shape.items()
        if size > 1 and axis not in manual_axes
    ]


def _refuse_automatic_axes(mesh, manual_axes, label):
    automatic = _automatic_axes(mesh, manual_axes)
    if automatic:
        raise UnsupportedOverlapError(
            f"{label}: the mesh axes {automatic} are left to XLA, which would gather "
            "the operands over them on every device. Call it inside jax.shard_map over "
            f"all mesh axes (leave out axis_names=), or {RUN_PLAIN}."
        )


def _refuse_devices(num_devices, label):
    raise UnsupportedOverlapError(
        f"{label}: the program runs on {num_devices or 'several'} devices, but the "
        "call is not inside jax.shard_map, so XLA would gather its operands on every "
        f"device. Call it inside jax.shard_map over all mesh axes, or {RUN_PLAIN}."
    )
