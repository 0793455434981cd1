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
from jax_ub.runtime import engine, hosts, settings
from jax_ub.runtime.bootstrap.agreement import Agreement, Values

Group = tuple[int, ...]  # global device ids, in the order of the ranks

# What a rank's share of a call needs at most, for each element of the capacity: f32
# partial sums and f32 results; and room for the starts of slots to be aligned.
_BYTES_PER_ELEMENT = 8
_SLACK_BYTES = 64 * 1024
_SLOT_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Connection:
    """One group of ranks that lie in several processes, as all of them decided."""

    group: Group
    processes: tuple[int, ...]  # by rank
    reason: str | None  # why it is not connected
    communicator: Any = None  # the engine's, where a rank of the group lies here


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks of `initialize_ub` lie, as this process sees it."""

    groups: tuple[Group, ...]
    process_of: Mapping[int, int]  # by global device id
    process: int
    platform: str  # of the devices
    capacity: int  # elements of a call, at most
    num_slots: int  # of a rank, at most
    name: str  # for errors

    @property
    def processes(self) -> list[int]:
        """All processes with a rank."""
        return sorted({self.process_of[i] for group in self.groups for i in group})

    @property
    def half_bytes(self) -> int:
        """What a rank may share for one call; there is twice as much."""
        slots = _SLOT_ALIGNMENT_BYTES * self.num_slots
        return _BYTES_PER_ELEMENT * self.capacity + slots + _SLACK_BYTES

    def processes_of(self, group: Group) -> tuple[int, ...]:
        """The process of every rank."""
        return tuple(self.process_of[device] for device in group)

    def spanning(self) -> list[Group]:
        """The groups that lie in several processes."""
        return [g for g in self.groups if len(set(self.processes_of(g))) > 1]


_CONNECTIONS: dict[Group, Connection] = {}


def connections() -> tuple[Connection, ...]:
    """All groups over several processes that were initialised, connected or not."""
    return tuple(_CONNECTIONS.values())


def reason(groups: np.ndarray, processes: np.ndarray) -> str | None:
    """Why the engine cannot serve a call; None if it can.

    Every process comes to the same answer, since all take part in one program.

    Args:
        groups: global device ids, `[groups, P]`.
        processes: the process of each, `[groups, P]`.
    """
    for group, owners in zip(groups.tolist(), processes.tolist(), strict=True):
        if len(set(owners)) == 1:
            continue
        connection = _CONNECTIONS.get(tuple(group))
        if connection is None:
            return (
                f"its ranks lie in processes {sorted(set(owners))}, which are not "
                "connected; call ub.initialize_ub(mesh=..., axis_name=...) on all of "
                "them first"
            )
        if connection.reason is not None:
            return connection.reason
    return None


def check_free(groups: Sequence[Group]) -> None:
    """Refuses groups that another axis has connected already.

    Raises:
        ConfigurationError: names the devices.
    """
    for group in groups:
        if group in _CONNECTIONS:
            raise ConfigurationError(
                f"initialize_ub: the devices {list(group)} are connected already, "
                "under another axis name. Use that one, or call ub.destroy_ub() first."
            )


def connect(
    place: Place,
    agreement: Agreement,
    about: Mapping[str, str],
    refusal: Exception | None,
) -> None:
    """Agrees with all processes of the mesh, and connects the groups of one host.

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
    with agreement:
        if refusal is None:
            offered, refusal = _offer(place)
        told = _gather(agreement, _introduction(about, refusal, offered), refusal)
        failure = refusal or _first_refusal(told)
        if failure is None and len({one["hash"] for one in told.values()}) > 1:
            failure = _difference(agreement.gather(dict(about)))
        if failure is None:
            error = _connect_all(place, told, offered, made)
            # Others may wait in vain for a connection before they come to this round.
            outcome = None if error is None else str(error)
            done = _gather(agreement, outcome, error, num_deadlines=2)
            failure = error or _first_failure(done)
    if failure is not None:
        _close(made)
        raise failure
    _CONNECTIONS.update((one.group, one) for one in made)
    _share_cores(told)
    _close_at_exit()


def _gather(agreement, value, own_error, num_deadlines=1):
    try:
        return agreement.gather(value, num_deadlines)
    except CommunicatorError as error:
        # What went wrong here first says more than that others did not come.
        if own_error is None:
            raise
        raise own_error from error


def _offer(place):
    try:
        cpu = engine.load()
        own = [g for g in place.spanning() if place.process in place.processes_of(g)]
        if place.platform != "cpu":
            return {}, None
        return {group: cpu.endpoint() for group in own}, None
    except Exception as error:
        return {}, CommunicatorError(f"initialize_ub: {error}")


def _introduction(about, refusal, offered):
    text = json.dumps(dict(about), sort_keys=True)
    return {
        "refused": None if refusal is None else str(refusal),
        "hash": hashlib.sha256(text.encode()).hexdigest(),
        "host": hosts.identity(),
        "cores": hosts.cores(),
        "endpoints": {
            _key(group): [endpoint.address, endpoint.token]
            for group, endpoint in offered.items()
        },
    }


def _key(group):
    return ",".join(map(str, group))


def _first_refusal(told: Values):
    for process, one in sorted(told.items()):
        if one["refused"] is not None:
            return CommunicatorError(
                f"initialize_ub: process {process} refused: {one['refused']}"
            )
    return None


def _difference(abouts: Values):
    first = min(abouts)
    for process, about in sorted(abouts.items()):
        for name in dict.fromkeys([*abouts[first], *about]):
            here, there = abouts[first].get(name), about.get(name)
            if here != there:
                return CommunicatorError(
                    f"initialize_ub: the processes differ in {name}: process {first} "
                    f"has {here}, process {process} has {there}. Give all processes "
                    "the same."
                )
    return None


def _first_failure(done: Values):
    for process, text in sorted(done.items()):
        if text is not None:
            return CommunicatorError(
                f"initialize_ub: process {process} could not connect: {text}"
            )
    return None


def _connect_all(place, told, offered, made):
    try:
        for group in place.spanning():
            made.append(_connect(place, told, offered, group))
    except Exception as error:
        offered.clear()  # so that others find closed sockets instead of waiting
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")
    return None


def _connect(place, told, offered, group) -> Connection:
    processes = place.processes_of(group)
    if place.platform != "cpu":
        return Connection(group, processes, f"no engine for {place.platform}")
    by_host: dict[str, list[int]] = {}
    for process in sorted(set(processes)):
        by_host.setdefault(told[process]["host"], []).append(process)
    if len(by_host) > 1:
        names = [
            f"{hosts.short_name(host)} (processes {members})"
            for host, members in by_host.items()
        ]
        return Connection(
            group, processes, f"its ranks span the hosts {' and '.join(names)}"
        )
    if group not in offered:
        return Connection(group, processes, None)
    others = sorted(set(processes) - {place.process})
    peers = {process: told[process]["endpoints"][_key(group)] for process in others}
    communicator = engine.load().connect(
        offered.pop(group),
        name=place.name,
        devices=list(group),
        processes=list(processes),
        process=place.process,
        addresses={process: address for process, (address, _) in peers.items()},
        tokens={process: token for process, (_, token) in peers.items()},
        half_bytes=place.half_bytes,
        timeout_s=settings.deadline_s(),
    )
    return Connection(group, processes, None, communicator)


def _share_cores(told: Values):
    if settings.num_threads() is not None:
        return
    own = hosts.identity()
    neighbours = [one["cores"] for one in told.values() if one["host"] == own]
    engine.load().set_num_threads(hosts.fair_share(hosts.cores(), neighbours))


@functools.cache
def _close_at_exit():
    # The peers then hear a goodbye instead of finding a dead connection.
    atexit.register(lambda: disconnect(list(_CONNECTIONS)))


def disconnect(groups: Sequence[Group]) -> None:
    """Closes the connections of these groups; peers that are dead are no hindrance."""
    closed = [_CONNECTIONS.pop(group) for group in groups if group in _CONNECTIONS]
    _close(closed)
    if closed and not _CONNECTIONS and settings.num_threads() is None:
        engine.load().set_num_threads(len(hosts.cores()))


def release_slots() -> None:
    """Returns the slots that calls inside this process have used, if there are any."""
    cpu = sys.modules.get("jax_ub._cpu")
    if cpu is not None:
        cpu.release_slots()


def _close(made: Sequence[Connection]):
    for connection in made:
        if connection.communicator is not None:
            connection.communicator.close()


def failures() -> Iterator[tuple[Group, str]]:
    """The connected groups that have failed, and why."""
    for connection in connections():
        failure = connection.communicator and connection.communicator.failure
        if failure:
            yield connection.group, failure
