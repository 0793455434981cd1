"""The connections of this process to its peers, one for each group of ranks.

A group that cannot be connected is listed with the reason.
"""

import atexit
import dataclasses
import functools
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jax_ub._src import errors
from jax_ub._src.errors import ConfigurationError
from jax_ub._src.runtime import cpu_engine, cuda_engine
from jax_ub._src.runtime.device_groups import DeviceGroups, Group, Key


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

    @property
    def key(self) -> Key:
        return self.platform, self.group

    @property
    def failure(self) -> str | None:
        failure = self.communicator and self.communicator.failure
        return _without_kind(failure) if failure else None

    def close(self) -> None:
        if self.communicator is not None:
            self.communicator.close()


# Part of the message if a call falls back to plain JAX because `initialize_ub` has not
# connected its processes. The lowering searches messages for this text, to name a page
# of the documentation.
UNCONNECTED = "which are not connected"

_CONNECTIONS: dict[Key, Connection] = {}
# Among how many processes the host's cores are divided; 0: the engine has no limit.
_num_sharing = 0


def connections() -> tuple[Connection, ...]:
    """Returns a `Connection` for each group of ranks, also if connecting it failed.

    A group that cannot share memory is included, with its `reason`.
    """
    return tuple(_CONNECTIONS.values())


def reason(platform: str, groups: np.ndarray, processes: np.ndarray) -> str | None:
    """Returns why calls over these groups must run as plain JAX; None if they need not.

    Every process gets the same answer: all processes lower the same program, so they
    must all fall back or none.

    Args:
        platform: platform of the devices.
        groups: global device ids, `[groups, P]`.
        processes: the process index of each device, `[groups, P]`.
    """
    for group, owners in zip(groups.tolist(), processes.tolist(), strict=True):
        connection = _CONNECTIONS.get((platform, tuple(group)))
        if connection is None:
            if len(set(owners)) == 1:
                continue
            return (
                f"its ranks are in processes {sorted(set(owners))}, {UNCONNECTED}; "
                "call ub.initialize_ub(mesh=..., axis_name=...) on all of them first"
            )
        if connection.reason is not None:
            return connection.reason
    return None


def generation(platform: str, groups: np.ndarray) -> int:
    """Returns which `initialize_ub` call connected these groups (1, 2, ...), or 0.

    Each `initialize_ub` that connects groups counts as one. It is 0 if none did, and
    the last one if several did.

    A program is bound to the generation that it was lowered for. Processes match their
    calls by XLA's launch numbers, which may differ between processes after a failure,
    so a communicator rejects programs of an earlier generation.
    """
    found = (_CONNECTIONS.get((platform, tuple(group))) for group in groups.tolist())
    return max((one.generation for one in found if one is not None), default=0)


def check_shared(device_groups: DeviceGroups) -> None:
    """Raises an error if another axis's connection has failed or has too little memory.

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
    """Registers new connections, which are closed at process exit at the latest."""
    _CONNECTIONS.update((one.key, one) for one in made)
    if made:
        _close_at_exit()


def limit_cores(num_processes: int, num_threads: int, cpu_set: Sequence[int]) -> None:
    """Limits the engine to a part of the host's cores, until all groups are closed.

    Does nothing if an axis of more processes has already divided the cores: the engine
    would compute on the cores of these processes.
    """
    global _num_sharing
    if num_processes >= _num_sharing:
        _num_sharing = num_processes
        cpu_engine.load().set_num_threads(num_threads, cpu_set)


@functools.cache
def _close_at_exit():
    # Closing tells the peers that this process ends in order. Otherwise they would
    # report it as lost.
    atexit.register(disconnect_all_but, ())


def disconnect_all_but(kept: Collection[Key]) -> None:
    """Closes the connections of all groups but `kept`. Does not wait for lost peers.

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
    # The engines' messages begin with "CommunicatorError: ", because XLA's errors do
    # not keep the exception type. The callers here need only the rest of the text.
    return failure.removeprefix("CommunicatorError: ")
