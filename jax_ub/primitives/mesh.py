"""Where a call runs: its mesh axis when it is traced, its ranks when it is lowered."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_ub.errors import ShapeContractError, UnsupportedOverlapError, nearest, shown
from jax_ub.runtime import communicators
from jax_ub.shapes import axis_tuple, check_axis_name, has_symbolic_sizes


def axis_size(
    op: str, axis_name: str | tuple[str, ...], *, may_be_mapped: bool = False
) -> int:
    """The number of ranks on `axis_name`, checked to be a manual mesh axis.

    Args:
        op: the call, for errors.
        axis_name: the axis.
        may_be_mapped: whether it may be an axis of `jax.vmap` instead, on which plain
            `jax.lax` communicates.

    Raises:
        ShapeContractError: outside `jax.shard_map`, or over an axis that is not manual;
            as `check_axis_name`.
    """
    check_axis_name(op, axis_name)
    axes = axis_tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    missing = [axis for axis in axes if axis not in manual]
    if may_be_mapped and missing:
        try:
            return lax.axis_size(axes)
        except NameError:  # it is no axis at all
            pass
    if manual and missing and missing[0] not in mesh.axis_names:
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)}, but the mesh of this jax.shard_map "
            f"has no axis {shown(missing[0])}. {nearest(missing[0], mesh.axis_names)}"
        )
    if missing:
        here = f"only {tuple(manual)} are" if manual else "no axis is manual here"
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)} is not a manual mesh axis; {here}. "
            "Call it inside jax.shard_map over all mesh axes, for example "
            "jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)."
        )
    return lax.axis_size(axes)


def are_manual(axes: tuple[str, ...]) -> bool:
    """Whether all of the axes are manual mesh axes here."""
    return set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def check_manual(label: str) -> None:
    """Refuses a `shard_map` that is manual over some mesh axes only, in a trace.

    Axes of one device are no matter. Outside any `shard_map` only the lowering knows
    whether the program runs on several devices.

    Raises:
        UnsupportedOverlapError: if an axis is left to XLA.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        _refuse_automatic_axes(mesh, mesh.manual_axes, label)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The devices of a lowered call, or why the engine cannot serve them."""

    table: np.ndarray  # i64 global ids, table[group * P + rank]; empty for a local op
    reason: str | None
    spans_processes: bool = False  # whether a group has ranks in several processes
    groups: tuple[tuple[jax.Device, ...], ...] = ()  # the same as devices
    ids: tuple[int, ...] = ()  # of all devices, in the order of the mesh
    generation: int = 0  # of the communicators, where there are
    # Whether the ids are partition numbers: the mesh is abstract and names no devices.
    are_partitions: bool = False


def find_ranks(
    ctx: mlir.LoweringRuleContext,
    label: str,
    axes: tuple[str, ...],
    *,
    takes_partitions: bool = False,
) -> Ranks:
    """Reads the ranks on `axes` from the mesh that the call is lowered for.

    Args:
        ctx: the lowering.
        label: the call, for errors.
        axes: the mesh axes of the ranks.
        takes_partitions: whether a rank may be found by the number of its partition,
            so that an abstract mesh of one process suffices.

    Raises:
        UnsupportedOverlapError: if XLA would have to gather the operands first, because
            the call is not inside a `shard_map` over all mesh axes.
    """
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        _refuse_unless_one_device(context, label)
        return Ranks(np.zeros(0, np.int64), None)
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh = context.mesh
    _refuse_automatic_axes(mesh, context.manual_axes, label)
    if any(map(has_symbolic_sizes, ctx.avals_in)):
        # jaxlib may crash over one where the program is called. jax 0.10.2 infers the
        # sizes of a dot and a collective from their operands; 0.12 finds none at all.
        return Ranks(
            np.zeros(0, np.int64),
            "it is exported with symbolic sizes, and inside jax.shard_map XLA cannot "
            "find the sizes of a custom call; export it once for each size",
        )
    if not axes:
        return Ranks(np.zeros(0, np.int64), None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        if takes_partitions and jax.process_count() == 1:
            # Partitions are numbered in the order of the mesh.
            ids = tuple(range(math.prod(mesh.axis_sizes)))
            groups = rank_groups(mesh, axes, ids)
            return Ranks(groups.reshape(-1), None, ids=ids, are_partitions=True)
        return Ranks(
            np.zeros(0, np.int64),
            "it is lowered for an abstract mesh, which names no devices; pass "
            "jax.shard_map(mesh=...) or jax.set_mesh a concrete jax.sharding.Mesh",
        )
    devices = list(mesh.devices.flat)
    ids = tuple(device.id for device in devices)
    groups = rank_groups(mesh, axes, ids)
    owners = rank_groups(mesh, axes, [device.process_index for device in devices])
    places = rank_groups(mesh, axes, range(len(devices)))
    return Ranks(
        groups.reshape(-1),
        communicators.reason(groups, owners),
        bool((owners != owners[:, :1]).any()),
        tuple(tuple(devices[i] for i in row) for row in places.tolist()),
        ids,
        communicators.generation(groups),
    )


def rank_groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axes: tuple[str, ...],
    values: Sequence[int],
) -> np.ndarray:
    """Arranges what every device has by groups of ranks: `[groups, P]`.

    Args:
        mesh: the mesh.
        axes: the axes of the ranks; the others tell the groups apart.
        values: one for each device, in the order of `mesh.devices.flat`.
    """
    table = np.asarray(values, np.int64).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    # The group axis last: every row of the table is one group, in the order of ranks.
    moved = np.moveaxis(table, places, range(-len(axes), 0))
    return moved.reshape(-1, math.prod(moved.shape[-len(axes) :]))


def _refuse_automatic_axes(mesh, manual_axes, label):
    automatic = [
        axis
        for axis, size in mesh.shape.items()
        if size > 1 and axis not in manual_axes
    ]
    if automatic:
        raise UnsupportedOverlapError(
            f"{label}: the mesh axes {automatic} are left to XLA, which would gather "
            "the operands over them on every device. Call it inside jax.shard_map over "
            'all mesh axes (leave out axis_names=), or pass method="xla".'
        )


def _refuse_unless_one_device(context, label):
    num_devices = getattr(context, "num_devices", None)
    if num_devices != 1:
        raise UnsupportedOverlapError(
            f"{label}: the program runs on {num_devices or 'several'} devices, but the "
            "call is not inside jax.shard_map, so XLA would gather its operands on "
            "every device. Call it inside jax.shard_map over all mesh axes, or pass "
            'method="xla".'
        )
