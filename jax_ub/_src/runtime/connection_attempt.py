"""Connects the groups of ranks of `initialize_ub`, jointly in all processes."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from jax_ub._src import errors
from jax_ub._src.errors import CommunicatorError
from jax_ub._src.runtime import cpu_engine, hosts, settings
from jax_ub._src.runtime.bootstrap.meeting import (
    difference,
    gather_or_raise,
    refusal_of_another,
    status,
)
from jax_ub._src.runtime.bootstrap.process_all_gather import ProcessAllGather, Values
from jax_ub._src.runtime.device_groups import DeviceGroups, Group
from jax_ub._src.runtime.transports import transport_setup_of

# How long a process that failed to connect waits for the peers' results. The death of a
# process must be reported within 2 s.
_TOLD_WITHIN_S = 1.0


@dataclasses.dataclass(frozen=True)
class Connection:
    """The result of connecting one group of ranks: a communicator, or why not.

    On CPUs only groups that span several processes have one. On GPUs all groups of
    `initialize_ub` with more than one rank have one.
    """

    group: Group
    processes: tuple[int, ...]  # process index of each rank
    reason: str | None  # why the group is not connected; None if it is
    communicator: Any = None  # set if a rank of the group is in this process
    generation: int = 0  # the communicator's generation, equal in all its processes
    call_bytes: int = 0  # shared memory of a rank for one call

    def close(self) -> None:
        """Closes the group's communicator if this process has one of its ranks."""
        if self.communicator is not None:
            self.communicator.close()


class ConnectionAttempt:
    """Connects this process's groups of ranks, and closes them if that fails.

    The attempt ends when all processes have connected, or one has failed.

    Attributes:
        made: the connections, including those of groups that cannot be connected.
        generation: the last communicator generation that this process agreed on.
    """

    def __init__(
        self, device_groups: DeviceGroups, connected: Collection[Group], generation: int
    ):
        """Selects the groups of ranks that are not connected yet.

        Args:
            device_groups: the groups of ranks, and the process of each device.
            connected: the groups that are connected already.
            generation: the last communicator generation that this process agreed on.
        """
        self.made: list[Connection] = []
        self.generation = generation
        self._place = device_groups
        self._transport_setup = transport_setup_of(device_groups.platform)
        self._offered: dict[Group, Any] = {}
        self._groups = [
            group
            for group in self._transport_setup.groups(device_groups)
            if group not in connected
        ]

    def agree(
        self,
        agreement: ProcessAllGather,
        agreed_settings: Mapping[str, str],
        own_error: Exception | None,
    ) -> Values:
        """Connects all groups that can be connected, or fails in every process.

        Args:
            agreement: all-gathers values over the processes: in two rounds, or in three
                if their settings differ.
            agreed_settings: settings that must be equal in all processes, by name.
            own_error: why this process cannot take part, or None.

        Returns:
            The handshake values of each process, by process index.

        Raises:
            CommunicatorError: if another process failed, has different settings, or
                could not connect. If `own_error` is given, that is raised.
            TimeoutError: if processes did not arrive before the deadline.
        """
        with agreement:
            if own_error is None:
                own_error = self._offer()
            peer_info = gather_or_raise(
                agreement, self._introduction(agreed_settings, own_error), own_error
            )
            failure = own_error or refusal_of_another(peer_info)
            if failure is None:
                self.generation = _agreed_generation(peer_info)
            if failure is None and len({one["hash"] for one in peer_info.values()}) > 1:
                failure = _difference(agreement.gather(dict(agreed_settings)))
            if failure is None:
                failure = self._connect_and_tell(agreement, peer_info)
        if failure is not None:
            raise failure
        return peer_info

    def _connect_and_tell(self, agreement, peer_info):
        error = self.connect_all(peer_info)
        outcome = {
            # Peers may wait a whole timeout for a connection that failed here before
            # they take part in this all-gather.
            "failed": None if error is None else str(error),
            "reasons": {_key(one.group): one.reason for one in self.made if one.reason},
        }
        done = gather_or_raise(agreement, outcome, error, _patience_s(error))
        self._take_reasons(done)
        return error or _first_failure(done)

    def close(self) -> None:
        """Closes all connections and listening endpoints that the attempt opened.

        They are closed explicitly because the traceback of an error may keep this
        object alive.
        """
        for connection in self.made:
            connection.close()
        self.made.clear()
        self._offered.clear()

    def _offer(self):
        try:
            # Every call needs it; checked here so that all processes get the error.
            cpu_engine.check_isa()
            for group in self._groups:
                if self._place.spans_processes(group) and self._place.has_local_rank(
                    group
                ):
                    self._offered[group] = self._transport_setup.open_endpoint(
                        self._place, group
                    )
        except Exception as error:
            return self._gave_up(error)
        return None

    def connect_all(self, peer_info: Values) -> Exception | None:
        """Connects all groups that can share memory; other groups get a reason.

        Args:
            peer_info: the handshake values by process; empty if there is only one
                process.

        Returns:
            The error, or None.
        """
        try:
            for group in self._groups:
                self.made.append(self._connect(peer_info, group))
        except Exception as error:
            return self._gave_up(error)
        return None

    def _gave_up(self, error):
        self._offered.clear()  # closes the sockets, so that peers fail at once
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")

    def _introduction(self, agreed_settings, own_error):
        text = json.dumps(dict(agreed_settings), sort_keys=True)
        return {
            **status(own_error),
            "generation": self.generation + 1,
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "host": hosts.identity(),
            "cores": hosts.cores(),
            "control_groups": hosts.control_groups(),
            "endpoints": {
                _key(group): self._transport_setup.endpoint_info(one)
                for group, one in self._offered.items()
            },
        }

    def _connect(self, peer_info, group) -> Connection:
        device_groups = self._place
        processes = device_groups.processes_of(group)
        spans = device_groups.spans_processes(group)
        endpoint_infos = {
            process: peer_info[process]["endpoints"].get(_key(group), {})
            for process in (set(processes) if spans else ())
        }
        reason = self._transport_setup.why_not(
            device_groups, group, peer_info, endpoint_infos
        )
        if reason is not None or not device_groups.has_local_rank(group):
            return Connection(group, processes, reason)
        generation = _agreed_generation(peer_info)
        try:
            endpoint = self._offered.pop(group) if spans else None
            communicator = self._transport_setup.connect(
                device_groups, group, endpoint, endpoint_infos, generation
            )
        except NotImplementedError as error:
            return Connection(group, processes, str(error))
        size = device_groups.call_bytes
        return Connection(group, processes, None, communicator, generation, size)

    def _take_reasons(self, done: Values):
        """Closes each group that any process failed to connect, and stores why."""
        reasons: dict[str, str] = {}
        for _, one in sorted(done.items()):
            reasons = {**one["reasons"], **reasons}
        for i, connection in enumerate(self.made):
            reason = connection.reason or reasons.get(_key(connection.group))
            if reason is not None:
                connection.close()
                self.made[i] = dataclasses.replace(
                    connection, reason=reason, communicator=None
                )


def _key(group):
    return ",".join(map(str, group))


def _agreed_generation(peer_info: Values):
    # Each process proposes its last generation plus 1, so the maximum is new to all of
    # them. A single process has no generation.
    return max((one["generation"] for one in peer_info.values()), default=0)


def _patience_s(error):
    """Returns how many seconds to wait for the other processes' results."""
    longest_s = 2 * settings.deadline_s()
    # Live peers learn of an error quickly; the peer that caused it may be lost.
    return longest_s if error is None else min(longest_s, _TOLD_WITHIN_S)


def _difference(abouts: Values):
    for name in dict.fromkeys(
        name for agreed_settings in abouts.values() for name in agreed_settings
    ):
        values = {
            process: agreed_settings.get(name)
            for process, agreed_settings in abouts.items()
        }
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
