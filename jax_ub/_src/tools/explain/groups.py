"""Reads which devices a collective of HLO text connects, and along which mesh axes."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

# Match the replica groups of a collective: listed, in iota format, or as mesh axes.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))? ?\{([^}]*)\}"
)
# Matches the devices of a mesh in another order than by id, in iota format.
_DEVICE_IDS = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")


def named_mesh_in(text: str) -> dict[str, int]:
    """Returns {mesh axis: size} from HLO text, or {} if it lacks the user's names.

    XLA may make up names of axes, such as "axis_0". Such meshes are ignored.
    """
    for found in _MESH.finditer(text):
        sizes = _sizes(found[1])
        if not any(name.startswith("axis_") for name in sizes):  # XLA makes such names
            return sizes
    return {}


def size_and_axes(text: str, mesh: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """Returns the size of a collective's device groups, and the mesh axes they span.

    The number is 1, and the axes are empty, if they are unknown.
    """
    groups = _device_groups(text)
    if not groups:
        return 1, ()
    names = [name for name, size in mesh.items() if size > 1]
    for num_axes in range(1, len(names) + 1):
        for axes in itertools.combinations(names, num_axes):
            along = [set(group) for group in _groups_along(mesh, axes)]
            if all(any(whole.issuperset(one) for whole in along) for one in groups):
                return len(groups[0]), axes
    return len(groups[0]), ()


def _sizes(text):
    return {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", text)}


def _device_groups(text) -> list[list[int]]:
    """Reads the device groups of a collective from its HLO text: [] if it has none.

    For example, `replica_groups={{0,1},{2,3}}` gives [[0, 1], [2, 3]]. Each group of a
    collective-permute is the source and the target of one transfer.
    """
    if listed := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return [[int(number) for number in group.split(",")] for group in groups]
    if iota := _IOTA.search(text):
        return _iota(iota[2], iota[3]).reshape(-1, int(iota[1])).tolist()
    if found := _MESH.search(text):
        along = _groups_along(_sizes(found[1]), re.findall(r"'([^']*)'", found[3]))
        if found[2] is None:
            return along
        if iota := _DEVICE_IDS.fullmatch(found[2]):
            return _iota(*iota.groups()).reshape(-1)[along].tolist()
    return []


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Returns device numbers in XLA's iota format: of shape `sizes`, then transposed.

    For example, "2,2" and "1,0" give [[0, 2], [1, 3]].
    """
    dims = [int(size) for size in sizes.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else None
    return np.arange(math.prod(dims)).reshape(dims).transpose(axes)


def _groups_along(mesh: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Returns the device numbers of each group of a mesh along some of its axes."""
    names = list(mesh)
    order = [name for name in names if name not in axes]
    order += [name for name in axes if name in names]
    numbers = np.arange(math.prod(mesh.values())).reshape([*mesh.values()])
    size = math.prod(mesh[name] for name in axes if name in names)
    return numbers.transpose([*map(names.index, order)]).reshape(-1, size).tolist()
