"""The groups of ranks that communicate, and the connections of this process to peers.

A rank is one device. A group that cannot be connected is listed with the reason.
"""

import atexit
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ub._src import errors
from jax_ub._src.errors import ConfigurationError
from jax_ub._src.runtime import cpu_engine, cuda_engine, settings

Group = tuple[int, ...]  # global device ids, in the order of the ranks
Key = tuple[str, Group]  # with the platform, because the ids of each begin at 0

# Bytes of a rank's buffer per element of the capacity: at most one f32 partial sum and
# one f32 result. _SLACK_BYTES per rank and _SLOT_ALIGNMENT_BYTES per slot are added for
# the alignment of slots.
_BYTES_PER_ELEMENT = 8
_SLACK_BYTES = 64 * 1024
_SLOT_ALIGNMENT_BYTES = 256
# Unless a tuned file selects the method, an all-reduce on GPUs is one-shot if each rank
# sends at most this many bytes. One-shot means that each of P ranks sends its array of
# S bytes to all peers, S (P - 1) bytes together. A reduce-scatter and an all-gather
# send only 2 S (P - 1) / P bytes, but need a second handshake. The limit is what NVLink
# moves at 450 GB/s (H100) in the 6 us of a handshake (`handshake_s` of the simulator).
# Neither number was measured here.
ONE_SHOT_BYTES = 2_700_000
# Seconds between two checks whether the programs in flight have ended.
_POLL_S = 0.002


def heap_bytes(platform: str, num_elements: int) -> int:
    """Returns how many bytes of buffers a rank needs for calls of `num_elements`."""
    least = ONE_SHOT_BYTES if platform == "cuda" else 0
    return max(_BYTES_PER_ELEMENT * num_elements, least)


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """The groups of devices that `initialize_ub` connects, with their processes.

    One rank is one device. A group has the ranks that communicate with each other, and
    belongs to one index of the other mesh axes.
    """

    groups: tuple[Group, ...]
    process_of: Mapping[int, int]  # process index by global device id
    process: int  # index of this process
    platform: str  # platform of the devices: "cpu", "cuda", ...
    capacity: int = 0  # largest number of elements of a call
    num_slots: int = 0  # largest number of slots of a rank
    name: str = ""  # for errors
    # CUDA ordinals of this process's GPUs, keyed by global device id.
    ordinals: Mapping[int, int] = dataclasses.field(default_factory=dict)
    client: Any = None  # XLA's client of the ranks in this process, if there are any

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple((self.platform, group) for group in self.groups)

    @property
    def num_local_ranks(self) -> int:
        """Returns how many ranks are in this process."""
        owners = [owner for group in self.groups for owner in self.processes_of(group)]
        return owners.count(self.process)

    @property
    def any_spans_processes(self) -> bool:
        return any(map(self.spans_processes, self.groups))

    @property
    def call_bytes(self) -> int:
        """Returns the size of a rank's memory that its peers can access, in bytes."""
        slots = _SLOT_ALIGNMENT_BYTES * self.num_slots
        return heap_bytes(self.platform, self.capacity) + slots + _SLACK_BYTES

    def processes_of(self, group: Group) -> tuple[int, ...]:
        """Returns the process index of each device in the group, in rank order."""
        return tuple(self.process_of[device] for device in group)

    def has_local_rank(self, group: Group) -> bool:
        return self.process in self.processes_of(group)

    def spans_processes(self, group: Group) -> bool:
        return len(set(self.processes_of(group))) > 1

    def ordinals_of(self, group: Group) -> list[int]:
        """Returns the CUDA ordinals of the group's local GPUs, in rank order."""
        own = (i for i in group if self.process_of[i] == self.process)
        return [self.ordinals[i] for i in own]


def rank_groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axes: tuple[str, ...],
    ids: Sequence[int],
) -> tuple[Group, ...]:
    """Returns the device ids of each group of ranks along `axes`, in rank order.

    Each index of the other mesh axes is one group. `ids` has one id per device, in the
    order of `mesh.devices.flat`.
    """
    table = np.asarray(ids, np.int64).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    # The axes of the ranks become the last ones, so that each row of the result has the
    # devices of one group, in rank order.
    moved = np.moveaxis(table, places, range(-len(axes), 0))
    num_ranks = math.prod(moved.shape[-len(axes) :])
    return tuple(map(tuple, moved.reshape(-1, num_ranks).tolist()))


@dataclasses.dataclass(frozen=True)
class Connection:
    """The outcome of connecting a group of ranks: a communicator, or an error.

    On CPUs only groups that span several processes have one. On GPUs all groups of
    `initialize_ub` with more than one rank have one.
    """

    group: Group
    platform: str  # platform of the devices: "cpu", "cuda", ...
    processes: tuple[int, ...]  # process index of each rank
    reason: str | None  # why the group is not connected; None if it is
    communicator: Any = None  # set if a rank of the group is in this process
    generation: int = 0  # the communicator's generation, equal in all processes
    call_bytes: int = 0  # shared memory of a rank for one call
    client: Any = None  # as in `DeviceGroups`
    pid: int = dataclasses.field(default_factory=os.getpid)

    @property
    def key(self) -> Key:
        return self.platform, self.group

    @property
    def failure(self) -> str | None:
        failure = self.communicator and self.communicator.failure
        return _without_kind(failure) if failure else None

    @property
    def may_be_in_use(self) -> bool:
        """Returns whether closing the connection might make a running call fail.

        XLA's threads do not exist in a forked child, so no call is in flight there.
        """
        is_usable = self.communicator is not None and self.failure is None
        return is_usable and self.pid == os.getpid()

    def close(self) -> None:
        if self.communicator is not None:
            self.communicator.close()


# This text is part of the reason for a fallback to plain JAX if `initialize_ub` has not
# connected the processes of the call. The lowering rule searches reasons for this text,
# in order to add a reference to a page of the documentation.
UNCONNECTED = "which are not connected"

_CONNECTIONS: dict[Key, Connection] = {}
# Number of processes among which the host's cores are divided, or 0 if the cores are
# not divided.
_num_sharing = 0


def connections() -> tuple[Connection, ...]:
    """Returns a `Connection` for each group of ranks, including those that failed.

    A group that cannot share memory is included, with its `reason`.
    """
    return tuple(_CONNECTIONS.values())


def reason(device_groups: DeviceGroups) -> str | None:
    """Returns why calls over these groups must run as plain JAX, or None.

    Every process gets the same answer: all processes lower the same program, so they
    must all fall back or none.
    """
    connected = _connected(device_groups)
    for group in device_groups.groups:
        if group in connected and connected[group].reason is not None:
            return connected[group].reason
        if group not in connected and device_groups.spans_processes(group):
            owners = sorted(set(device_groups.processes_of(group)))
            return (
                f"its ranks are in processes {owners}, {UNCONNECTED}; "
                "call ub.initialize_ub(mesh=..., axis_name=...) on all of them first"
            )
    return None


def generation(device_groups: DeviceGroups) -> int:
    """Returns the number of the `initialize_ub` call that connected the groups, or 0.

    Each `initialize_ub` that connects groups counts as one. The result is 0 if no call
    has connected the groups, and the number of the last call if several have.

    A program is bound to the generation that it was lowered for. Processes match their
    calls by XLA's launch numbers, which may differ between processes after a failure,
    so a communicator rejects programs of an earlier generation.
    """
    found = _connected(device_groups).values()
    return max((one.generation for one in found), default=0)


def check_shared(device_groups: DeviceGroups) -> None:
    """Raises an error if a connection shared with another axis failed or is too small.

    An axis reuses the connections of other axes that have the same groups of devices.
    """
    for group, connection in _connected(device_groups).items():
        if connection.communicator is None:
            continue
        failure = connection.failure
        if failure:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are already connected for "
                f"another axis, and have failed: {failure}. Call ub.destroy_ub() first."
            )
        if connection.call_bytes < device_groups.call_bytes:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are already connected for "
                f"another axis, with {connection.call_bytes} bytes per rank, but this "
                f"shape needs {device_groups.call_bytes}. Initialize the axis with the "
                "largest shape first."
            )


def shared_groups(device_groups: DeviceGroups) -> str:
    """Returns which groups of ranks other mesh axes have already connected, as text.

    The processes compare it, since they must agree on which groups to connect.
    """
    return str(sorted(_connected(device_groups)))


def _connected(device_groups):
    found = map(_CONNECTIONS.get, device_groups.keys)
    return {one.group: one for one in found if one is not None}


def add(made: Sequence[Connection]) -> None:
    """Registers new connections, and arranges that process exit closes them."""
    _CONNECTIONS.update((one.key, one) for one in made)
    if made:
        _close_at_exit()


def limit_cores(num_processes: int, num_threads: int, cpu_set: Sequence[int]) -> None:
    """Limits the engine to a part of the host's cores until all connections are closed.

    Does nothing if an axis of more processes has already divided the cores: the engine
    would compute on the cores of these processes.
    """
    global _num_sharing
    if num_processes >= _num_sharing:
        _num_sharing = num_processes
        cpu_engine.load().set_num_threads(num_threads, cpu_set)


@functools.cache
def _close_at_exit():
    # Closing the connections tells the peers that this process exits. Otherwise, the
    # peers would report the process as lost.
    @atexit.register
    def finish_and_disconnect():
        finish_launches(())
        disconnect_all_but(())


def finish_launches(kept: Collection[Key]) -> None:
    """Waits for running programs before connections that are not in `kept` are closed.

    A launch returns before its program has run. The peers take part in the calls of
    these programs, so closing the connections during a program would fail the peers.

    Does not wait longer than `initialize_ub` waits for a process, and not at all if the
    connections have failed, since all their calls then fail at once.
    """
    closing = [one for key, one in _CONNECTIONS.items() if key not in kept]
    clients = {one.client for one in closing if one.may_be_in_use} - {None}
    end_s = time.monotonic() + settings.timeout_s()
    try:
        last = [
            result
            for client in clients
            for result in _launch_after_all(client.local_devices())
        ]
    # JAX raises an error here if it is tracing a program or has no memory left. The
    # error is ignored, because the caller must close the connections in any case.
    except (ValueError, jax.errors.JaxRuntimeError):
        return
    # The loop polls, because jax.block_until_ready ignores Ctrl-C.
    while not all(array.is_ready() for array in last) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _launch_after_all(devices):
    """Launches programs that run after all earlier ones, and returns their results.

    XLA on CPUs runs all programs of several devices one after the other, and the
    programs of one device, too, but not in one order with those of several.
    """
    results = []
    for chosen in [[device] for device in devices] + [devices] * (len(devices) > 1):
        mesh = Mesh(np.array(chosen), ("devices",))
        # The caller's context may set a mesh or a transfer guard, which must not apply
        # here.
        with jax.transfer_guard("allow"), jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, jax.P("devices"))
            zeros = jax.device_put(np.zeros(len(chosen), np.float32), sharding)
            results.append(jnp.negative(zeros))
    return results


def disconnect_all_but(kept: Collection[Key]) -> None:
    """Closes all connections except those in `kept`. Does not wait for lost peers.

    Each group is removed only after it has been closed, so that an interrupted call can
    be repeated.
    """
    global _num_sharing
    for key in [key for key in _CONNECTIONS if key not in kept]:
        _CONNECTIONS[key].close()
        _CONNECTIONS.pop(key, None)
    if _num_sharing and not _CONNECTIONS:
        cpu = cpu_engine.load()
        if cpu.has_engine():
            cpu.set_num_threads(cpu.default_num_threads())
        _num_sharing = 0


def release_slots() -> None:
    """Frees communication buffers of calls whose ranks are all in this process."""
    cpu = sys.modules.get("jax_ub._cpu")
    if cpu is not None:
        cpu.release_slots()
    cuda_engine.release_in_process()


def check_communicators() -> None:
    """Raises the first communication failure of a connected group of ranks, if any.

    On GPUs a wait fails on the device: the results of that call are NaN, and the host
    reports the failure at the next call, or here. Transformer Engine: none.

    Raises:
        TimeoutError: if a rank waited for its peers until its deadline.
        CommunicatorError: if a rank failed in another way.
    """
    found = ((f"devices {list(one.group)}", one.failure) for one in connections())
    failed = {where: failure for where, failure in found if failure is not None}
    for where, failure in {**failed, **cuda_engine.failures()}.items():
        raise errors.of_failure(f"{where}: {_without_kind(failure)}")


def _without_kind(failure):
    # The engines' messages begin with "CommunicatorError: ", because XLA does not
    # preserve the type of an exception. The callers here need the rest of the message.
    return failure.removeprefix("CommunicatorError: ")
