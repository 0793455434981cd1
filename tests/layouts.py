"""The same tests in several processes: which devices they take, what each one sees.

`tests/processes` starts pytest under `python -m jax_ub launch`, with the way to spread
ranks over processes in `UB_TEST_LAYOUT`. Every process then runs the same tests, and
compares the shards that it has. `UB_TEST_PART=1/3` is the second third of the tests.
"""

import math
import os

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jax_ub as ub

LAYOUTS = {
    # Ranks 0, 1, ... in process 0, the next ones in process 1.
    "blocks": lambda rank, num_ranks, num: rank * num // num_ranks,
    # Like cards: rank r in process r % num. Neighbours are never in one process.
    "dealt": lambda rank, num_ranks, num: rank % num,
    # Process 0, which leads nothing then, has the last ranks, and most of them.
    "reversed": lambda rank, num_ranks, num: max(0, num - 1 - rank),
}
LAYOUT = os.environ.get("UB_TEST_LAYOUT")
PART = os.environ.get("UB_TEST_PART")
_CAPACITY = (1024, 64)
_CONNECTED: dict[tuple[str, ...], Mesh] = {}


def devices(num_ranks: int) -> list[jax.Device]:
    """So many devices, in the order of ranks, and some of every process.

    A program must run in every process that takes part in the test.
    """
    if LAYOUT is None:
        return jax.devices()[:num_ranks]
    num = jax.process_count()
    if num_ranks < num:
        pytest.skip(f"{num_ranks} ranks are too few for {num} processes")
    places = [LAYOUTS[LAYOUT](rank, num_ranks, num) for rank in range(num_ranks)]
    if max(map(places.count, places)) > jax.local_device_count():
        pytest.skip(f"{num_ranks} ranks are too many for the devices of a process")
    free = [jax.local_devices(process)[:] for process in range(num)]
    return [free[place].pop(0) for place in places]


def connect(mesh: Mesh, axis_name: str | tuple[str, ...] = "tp") -> Mesh:
    """Initialises an axis of the mesh, in place of another mesh; returns the mesh."""
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if LAYOUT is None or not set(axes) <= set(mesh.axis_names):
        return mesh
    if _CONNECTED.get(axes) != mesh or not ub.is_ub_initialized(axes):
        ub.destroy_ub(axes)
        tp_size = math.prod(mesh.shape[axis] for axis in axes)
        ub.initialize_ub(_CAPACITY, tp_size, mesh=mesh, axis_name=axes)
        _CONNECTED[axes] = mesh
    return mesh


def visible(array: jax.Array) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """The parts of an array that this process can see, with their places."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [(s.index, np.asarray(s.data)) for s in array.addressable_shards]
    return [((), np.asarray(array))]


def whole(array: jax.Array) -> np.ndarray:
    """All of an array, fetched from the other processes where it must be."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
