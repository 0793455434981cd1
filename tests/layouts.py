"""Runs tests in several processes: device layouts, and the shards of a process.

`tests/processes` starts pytest under `python -m jax_ub launch`. `UB_TEST_LAYOUT`
selects how ranks are assigned to processes. Every process runs the same tests and
compares its shards. `UB_TEST_PART=1/3` selects the second third of the tests.
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
    # Process 0 has the first ranks, process 1 the next ranks, and so on.
    "blocks": lambda rank, num_ranks, num: rank * num // num_ranks,
    # Round-robin: process r % num has rank r. Neighbors are never in one process.
    "dealt": lambda rank, num_ranks, num: rank % num,
    # Process 0 has the last ranks, and most of them, so it is not the leader.
    "reversed": lambda rank, num_ranks, num: max(0, num - 1 - rank),
}
LAYOUT = os.environ.get("UB_TEST_LAYOUT")
PART = os.environ.get("UB_TEST_PART")
_CAPACITY = (1024, 64)
_CONNECTED: dict[tuple[str, ...], Mesh] = {}


def devices(num_ranks: int) -> list[jax.Device]:
    """Returns `num_ranks` devices in rank order, with some of every process.

    A program must run in every process of the test.
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
    """Initializes a mesh axis, after destroying another mesh; returns the mesh."""
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
    """Returns the shards of an array in this process, with their indices."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return [(s.index, np.asarray(s.data)) for s in array.addressable_shards]
    return [((), np.asarray(array))]


def pairs_of_parts(a, b) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the shards of `a` in this process, each with the same part of `b`."""
    both_sharded = isinstance(a, jax.Array) and isinstance(b, jax.Array)
    # Shardings are equal in all processes, so that all of them take the same branch.
    if both_sharded and a.sharding.is_equivalent_to(b.sharding, a.ndim):
        both = [*zip(visible(a), visible(b), strict=True)]
        assert all(i == j for (i, _), (j, _) in both)
        return [(x, y) for (_, x), (_, y) in both]
    b = whole(b)  # compiles a program if other processes have parts of it
    return [(x, b[index]) for index, x in visible(a)]


def whole(array: jax.Array) -> np.ndarray:
    """Returns a whole array, gathered from the other processes if necessary."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
