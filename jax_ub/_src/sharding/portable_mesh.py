"""Pickles meshes: devices are stored by id and looked up again on loading."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


@dataclasses.dataclass(frozen=True)
class PortableMesh:
    """Picklable form of a `jax.sharding.Mesh`, with the ids of its devices."""

    axis_names: tuple[Any, ...]
    axis_types: tuple[AxisType, ...]
    shape: tuple[int, ...]
    platform: str
    device_ids: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "PortableMesh":
        devices = tuple(mesh.devices.flat)
        ids = tuple(device.id for device in devices)
        platform = devices[0].platform if devices else ""
        shape = mesh.devices.shape
        return cls(mesh.axis_names, mesh.axis_types, shape, platform, ids)

    def find(self) -> Mesh | None:
        """Returns a `Mesh` of this process's devices; None if a device is missing."""
        known = {(device.platform, device.id): device for device in jax.devices()}
        devices = [known.get((self.platform, each)) for each in self.device_ids]
        if None in devices:
            return None
        table = np.array(devices, object).reshape(self.shape)
        return Mesh(table, self.axis_names, axis_types=self.axis_types)


def pack(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces each `Mesh` in an object's state by a picklable `PortableMesh`."""
    return {
        name: PortableMesh.of(value) if isinstance(value, Mesh) else value
        for name, value in state.items()
    }


def unpack(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces each `PortableMesh` in an unpickled state by a `Mesh`, or by None.

    A mesh becomes None if this process lacks one of its devices.
    """
    return {
        name: value.find() if isinstance(value, PortableMesh) else value
        for name, value in state.items()
    }
