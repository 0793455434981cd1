"""The connections between processes: which groups of ranks have one, and why not."""

import atexit
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from jax_ub import errors
from jax_ub.errors import ConfigurationError
from jax_ub.runtime import cuda, engine, hosts, settings
from jax_ub.runtime.bootstrap.process_all_gather import ProcessAllGather, Values
from jax_ub.runtime.connection_attempt import Connection, ConnectionAttempt
from jax_ub.runtime.device_groups import DeviceGroups, Group

_CONNECTIONS: dict[Group, Connection] = {}
_GENERATION = [0]  # the last that this process agreed on
_HAS_SHARED_CORES = [False]  # whether the engine computes on its part of the cores only


def connections() -> tuple[Connection, ...]:
    """All groups that were initialised and share memory, or would if they could."""
    return tuple(_CONNECTIONS.values())


def reason(groups: np.ndarray, processes: np.ndarray) -> str | None:
    """Why the engine cannot serve a call; None if it can.

    Every process comes to the same answer, since all take part in one program.

    Args:
        groups: global device ids, `[groups, P]`.
        processes: the process of each, `[groups, P]`.
    """
    for group, owners in zip(groups.tolist(), processes.tolist(), strict=True):
        connection = _CONNECTIONS.get(tuple(group))
        if connection is None:
            if len(set(owners)) == 1:
                continue
            return (
                f"its ranks lie in processes {sorted(set(owners))}, which are not "
                "connected; call ub.initialize_ub(mesh=..., axis_name=...) on all of "
                "them first"
            )
        if connection.reason is not None:
            return connection.reason
    return None


def generation(groups: np.ndarray) -> int:
    """The generation of what connects the groups, `[groups, P]`; 0 where nothing does.

    A program serves the one that it was traced for: XLA's numbers of its launches, by
    which processes find each other's calls, may differ after a failure.
    """
    found = (_CONNECTIONS.get(tuple(group)) for group in groups.tolist())
    return max((one.generation for one in found if one is not None), default=0)


def check_shared(device_groups: DeviceGroups) -> None:
    """Refuses groups that another axis has connected, if they cannot serve this too.

    Raises:
        ConfigurationError: names the devices: they have failed, or too little memory.
    """
    for group, connection in _connected(device_groups).items():
        if connection.communicator is None:
            continue
        failure = _failure_of(connection)
        if failure:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are connected already, "
                f"under another axis name, and have failed: {failure}. Call "
                "ub.destroy_ub() first."
            )
        if connection.call_bytes < device_groups.call_bytes:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are connected already, "
                "under another axis name, for calls of "
                f"{connection.call_bytes} bytes a rank, but this shape needs "
                f"{device_groups.call_bytes}. Initialise the axis of the largest "
                f"shape first."
            )


def shared_groups(device_groups: DeviceGroups) -> str:
    """Names those that are connected already: the processes must not differ in them."""
    return str(sorted(_connected(device_groups)))


def _connected(device_groups):
    return {g: _CONNECTIONS[g] for g in device_groups.groups if g in _CONNECTIONS}


def connect(
    device_groups: DeviceGroups,
    agreement: ProcessAllGather,
    agreed_settings: Mapping[str, str],
    own_error: Exception | None,
) -> None:
    """Agrees with all processes of the mesh, and connects the groups that can be.

    Args:
        device_groups: where the ranks lie.
        agreement: with whom; two rounds, three where the processes differ.
        agreed_settings: what must be the same everywhere, by name.
        own_error: why this process cannot go on, or None.

    Raises:
        CommunicatorError: if another process refused, differs, or could not connect;
            the own refusal, if there is one.
        TimeoutError: if processes were missing when the deadline passed.
    """
    attempt = ConnectionAttempt(device_groups, _CONNECTIONS, _GENERATION[0])
    try:
        peer_info = attempt.agree(agreement, agreed_settings, own_error)
    except BaseException:  # an interrupt too: nobody else knows what was made
        attempt.close()
        raise
    finally:
        _GENERATION[0] = max(_GENERATION[0], attempt.generation)
    _keep(attempt)
    if device_groups.platform == "cpu":
        _share_cores(device_groups, peer_info)


def connect_alone(device_groups: DeviceGroups) -> None:
    """Connects the groups of the only process of a mesh, as far as they need it.

    Raises:
        CommunicatorError: if there is no memory for that.
    """
    attempt = ConnectionAttempt(device_groups, _CONNECTIONS, _GENERATION[0])
    error = attempt.connect_all({})
    if error is not None:
        attempt.close()
        raise error
    _keep(attempt)


def _keep(attempt):
    _CONNECTIONS.update((one.group, one) for one in attempt.made)
    if attempt.made:
        _close_at_exit()


def _share_cores(device_groups, peer_info: Values):
    if settings.num_threads() is not None:
        return
    here, own = hosts.identity(), hosts.cores()
    neighbours = [
        process for process in sorted(peer_info) if peer_info[process]["host"] == here
    ]
    everyone = [peer_info[process]["cores"] for process in neighbours]
    part = hosts.process_cpu_set(own, everyone, neighbours.index(device_groups.process))
    _HAS_SHARED_CORES[0] = True
    engine.load().set_num_threads(hosts.thread_share(own, everyone), part)


@functools.cache
def _close_at_exit():
    # The peers then hear a goodbye instead of finding a dead connection.
    atexit.register(disconnect_all_but, ())


def disconnect(groups: Sequence[Group]) -> None:
    """Closes the connections of these groups; peers that are dead are no hindrance.

    A group is forgotten once it is closed, so that whoever is interrupted can call this
    again.
    """
    for group in groups:
        if group in _CONNECTIONS:
            _CONNECTIONS[group].close()
            _CONNECTIONS.pop(group, None)
    if _HAS_SHARED_CORES[0] and not _CONNECTIONS:
        if engine.load().has_engine():
            engine.load().set_num_threads(len(hosts.cores()))
        _HAS_SHARED_CORES[0] = False


def disconnect_all_but(groups: Collection[Group]) -> None:
    """Closes all connections except those of `groups`."""
    disconnect([group for group in tuple(_CONNECTIONS) if group not in groups])


def release_slots() -> None:
    """Returns the slots that calls inside this process have used, if there are any."""
    cpu = sys.modules.get("jax_ub._cpu")
    if cpu is not None:
        cpu.release_slots()
    cuda.release_in_process()


def check_communicators() -> None:
    """Raises the first failure of ranks that `initialize_ub` has connected, if any.

    A GPU's waits end on the device, and the host hears of it at the next call, or here:
    after a failure the results of that call are NaN. Transformer Engine: none.

    Raises:
        TimeoutError: if a rank waited for its peers until its deadline.
        CommunicatorError: if a rank failed in another way.
    """
    found = {f"devices {list(group)}": failure for group, failure in failures()}
    for where, failure in {**found, **cuda.failures()}.items():
        raise errors.of_failure(f"{where}: {_without_kind(failure)}")


def failures() -> Iterator[tuple[Group, str]]:
    """The connected groups that have failed, and why."""
    for connection in connections():
        failure = _failure_of(connection)
        if failure:
            yield connection.group, failure


def _failure_of(connection):
    failure = connection.communicator and connection.communicator.failure
    return failure and _without_kind(failure)


def _without_kind(failure):
    # The engines name it, since XLA has no types for it; Python's error is of it.
    return failure.removeprefix("CommunicatorError: ")
