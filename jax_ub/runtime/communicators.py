"""The connections between processes: which groups of ranks have one, and why not."""

import atexit
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ub import errors
from jax_ub.errors import CommunicatorError, ConfigurationError
from jax_ub.runtime import cuda, engine, hosts, settings
from jax_ub.runtime.bootstrap.agreement import Agreement, Values
from jax_ub.runtime.bootstrap.meeting import (
    difference,
    refusal_of_another,
    status,
    tell,
)
from jax_ub.runtime.place import Group, Place
from jax_ub.runtime.wirings import wiring_of


@dataclasses.dataclass(frozen=True)
class Connection:
    """One group of ranks that share memory, as all processes decided.

    On a CPU those in several processes; on GPUs all that `initialize_ub` was given.
    """

    group: Group
    processes: tuple[int, ...]  # by rank
    reason: str | None  # why it is not connected
    communicator: Any = None  # the engine's, where a rank of the group lies here
    generation: int = 0  # counts the communicators that its processes ever agreed on
    call_bytes: int = 0  # what a rank has for one call


# A death is to be known within 2 s.
_TOLD_WITHIN_S = 1.0
_CONNECTIONS: dict[Group, Connection] = {}
_GENERATION = [0]  # the last that this process agreed on


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


def check_shared(place: Place) -> None:
    """Refuses groups that another axis has connected, if they cannot serve this too.

    Raises:
        ConfigurationError: names the devices: they have failed, or too little memory.
    """
    for group, connection in _connected(place).items():
        if connection.communicator is None:
            continue
        failure = _failure_of(connection)
        if failure:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are connected already, "
                f"under another axis name, and have failed: {failure}. Call "
                "ub.destroy_ub() first."
            )
        if connection.call_bytes < place.call_bytes:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are connected already, "
                "under another axis name, for calls of "
                f"{connection.call_bytes} bytes a rank, but this shape needs "
                f"{place.call_bytes}. Initialise the axis of the largest shape first."
            )


def shared_groups(place: Place) -> str:
    """Names those that are connected already: the processes must not differ in them."""
    return str(sorted(_connected(place)))


def _connected(place):
    return {g: _CONNECTIONS[g] for g in place.groups if g in _CONNECTIONS}


def _unconnected(place, wiring):
    return [group for group in wiring.groups(place) if group not in _CONNECTIONS]


def connect(
    place: Place,
    agreement: Agreement,
    about: Mapping[str, str],
    refusal: Exception | None,
) -> None:
    """Agrees with all processes of the mesh, and connects the groups that can be.

    Args:
        place: where the ranks lie.
        agreement: with whom; two rounds, three where the processes differ.
        about: what must be the same everywhere, by name.
        refusal: why this process cannot go on, or None.

    Raises:
        CommunicatorError: if another process refused, differs, or could not connect;
            the own refusal, if there is one.
        TimeoutError: if processes were missing when the deadline passed.
    """
    made: list[Connection] = []
    offered: dict[Group, Any] = {}
    wiring = wiring_of(place.platform)
    try:
        told = _agree_and_connect(
            place, wiring, agreement, about, refusal, offered, made
        )
    except BaseException:  # an interrupt too: nobody else knows what was made
        _close(made)
        # Who keeps the error would keep these, and their memory.
        offered.clear()
        made.clear()
        raise
    _CONNECTIONS.update((one.group, one) for one in made)
    if place.platform == "cpu":
        _share_cores(place, told)
    _close_at_exit()


def _agree_and_connect(place, wiring, agreement, about, refusal, offered, made):
    with agreement:
        if refusal is None:
            refusal = _offer(place, wiring, offered)
        introduction = _introduction(about, refusal, offered, wiring)
        told = tell(agreement, introduction, refusal)
        failure = refusal or refusal_of_another(told)
        if failure is None:
            _GENERATION[0] = _agreed_generation(told)
        if failure is None and len({one["hash"] for one in told.values()}) > 1:
            failure = _difference(agreement.gather(dict(about)))
        if failure is None:
            error = _connect_all(place, wiring, told, offered, made)
            outcome = {
                # Others may wait in vain for a connection before they come here.
                "failed": None if error is None else str(error),
                "reasons": {_key(one.group): one.reason for one in made if one.reason},
            }
            done = tell(agreement, outcome, error, _patience_s(error))
            failure = error or _first_failure(done)
            made[:] = _with_reasons(made, done)
    if failure is not None:
        raise failure
    return told


def connect_alone(place: Place) -> None:
    """Connects the groups of the only process of a mesh, as far as they need it.

    Raises:
        CommunicatorError: if there is no memory for that.
    """
    made: list[Connection] = []
    error = _connect_all(place, wiring_of(place.platform), {}, {}, made)
    if error is not None:
        _close(made)
        raise error
    _CONNECTIONS.update((one.group, one) for one in made)
    if made:
        _close_at_exit()


def _offer(place, wiring, offered):
    try:
        # Needed wherever a call runs, so that all learn if it is missing.
        engine.check_isa()
        for group in _unconnected(place, wiring):
            if place.spans(group) and place.is_here(group):
                offered[group] = wiring.offer(place, group)
    except Exception as error:
        offered.clear()
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")
    return None


def _introduction(about, refusal, offered, wiring):
    text = json.dumps(dict(about), sort_keys=True)
    return {
        **status(refusal),
        "generation": _GENERATION[0] + 1,
        "hash": hashlib.sha256(text.encode()).hexdigest(),
        "host": hosts.identity(),
        "cores": hosts.cores(),
        "endpoints": {
            _key(group): wiring.introduce(one) for group, one in offered.items()
        },
    }


def _key(group):
    return ",".join(map(str, group))


def _agreed_generation(told: Values):
    # Higher than any that one of them had; a process alone agrees on none.
    return max((one["generation"] for one in told.values()), default=0)


def _patience_s(error):
    """How long to wait for what the others say of their connections."""
    longest_s = 2 * settings.deadline_s()
    # Those that live hear of an error soon; whom it names may be dead.
    return longest_s if error is None else min(longest_s, _TOLD_WITHIN_S)


def _difference(abouts: Values):
    for name in dict.fromkeys(name for about in abouts.values() for name in about):
        values = {process: about.get(name) for process, about in abouts.items()}
        found = difference(name, values)
        if found is not None:
            return found
    return None


def _first_failure(done: Values):
    for process, one in sorted(done.items()):
        if one["failed"] is not None:
            return CommunicatorError(
                f"initialize_ub: process {process} could not connect: {one['failed']}"
            )
    return None


def _connect_all(place, wiring, told, offered, made):
    try:
        for group in _unconnected(place, wiring):
            made.append(_connect(place, wiring, told, offered, group))
    except Exception as error:
        offered.clear()  # so that others find closed sockets instead of waiting
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")
    return None


def _connect(place, wiring, told, offered, group) -> Connection:
    processes = place.processes_of(group)
    spans = place.spans(group)
    introduced = {
        process: told[process]["endpoints"].get(_key(group), {})
        for process in (set(processes) if spans else ())
    }
    reason = wiring.why_not(place, group, told, introduced)
    if reason is not None or not place.is_here(group):
        return Connection(group, processes, reason)
    try:
        endpoint = offered.pop(group) if spans else None
        generation = _agreed_generation(told)
        communicator = wiring.connect(place, group, endpoint, introduced, generation)
    except NotImplementedError as error:
        return Connection(group, processes, str(error))
    size = place.call_bytes
    return Connection(group, processes, None, communicator, generation, size)


def _with_reasons(made, done: Values):
    """What some process found out about a group holds for all."""
    reasons: dict[str, str] = {}
    for _, one in sorted(done.items()):
        reasons = {**one["reasons"], **reasons}
    agreed = []
    for connection in made:
        reason = connection.reason or reasons.get(_key(connection.group))
        if reason is not None and connection.communicator is not None:
            _close([connection])
            connection = dataclasses.replace(connection, communicator=None)
        agreed.append(dataclasses.replace(connection, reason=reason))
    return agreed


def _share_cores(place, told: Values):
    if settings.num_threads() is not None:
        return
    here, own = hosts.identity(), hosts.cores()
    neighbours = [process for process in sorted(told) if told[process]["host"] == here]
    everyone = [told[process]["cores"] for process in neighbours]
    part = hosts.own_part(own, everyone, neighbours.index(place.process))
    engine.load().set_num_threads(hosts.fair_share(own, everyone), part)


@functools.cache
def _close_at_exit():
    # The peers then hear a goodbye instead of finding a dead connection.
    atexit.register(lambda: disconnect(list(_CONNECTIONS)))


def disconnect(groups: Sequence[Group]) -> None:
    """Closes the connections of these groups; peers that are dead are no hindrance."""
    closed = [_CONNECTIONS.pop(group) for group in groups if group in _CONNECTIONS]
    _close(closed)
    shared = any(len(set(one.processes)) > 1 for one in closed)
    if shared and not _CONNECTIONS and settings.num_threads() is None:
        engine.load().set_num_threads(len(hosts.cores()))


def release_slots() -> None:
    """Returns the slots that calls inside this process have used, if there are any."""
    cpu = sys.modules.get("jax_ub._cpu")
    if cpu is not None:
        cpu.release_slots()
    cuda.release_in_process()


def _close(made: Sequence[Connection]):
    for connection in made:
        if connection.communicator is not None:
            connection.communicator.close()


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
