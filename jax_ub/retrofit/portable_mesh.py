"""Meshes in a form that pickles: devices are named by their ids."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


@dataclasses.dataclass(frozen=True)
class PortableMesh:
    """A `jax.sharding.Mesh` without its devices, which belong to one process.

    Attributes:
        axis_names: names of the axes.
        axis_types: their types.
        shape: their sizes.
        platform: the platform of the devices.
        device_ids: ids of the devices, in the order of the mesh.
    """

    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]
    shape: tuple[int, ...]
    platform: str
    device_ids: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "PortableMesh":
        """Describes a mesh."""
        devices = tuple(mesh.devices.flat)
        ids = tuple(device.id for device in devices)
        shape = mesh.devices.shape
        platform = devices[0].platform if devices else ""
        return cls(mesh.axis_names, mesh.axis_types, shape, platform, ids)

    def find(self) -> Mesh | None:
        """Returns the mesh of this process's devices, None where one is missing."""
        known = {(device.platform, device.id): device for device in jax.devices()}
        devices = [known.get((self.platform, each)) for each in self.device_ids]
        if None in devices:
            return None
        table = np.array(devices, object).reshape(self.shape)
        return Mesh(table, self.axis_names, axis_types=self.axis_types)


def pack(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces the meshes among the attributes of an object that is pickled."""
    return {
        name: PortableMesh.of(value) if isinstance(value, Mesh) else value
        for name, value in state.items()
    }


def unpack(state: dict[str, Any]) -> dict[str, Any]:
    """Undoes `pack`; a mesh whose devices are missing in this process becomes None."""
    return {
        name: value.find() if isinstance(value, PortableMesh) else value
        for name, value in state.items()
    }
