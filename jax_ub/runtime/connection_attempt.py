"""One attempt of all processes to connect the groups of `initialize_ub`."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from jax_ub import errors
from jax_ub.errors import CommunicatorError
from jax_ub.runtime import engine, hosts, settings
from jax_ub.runtime.bootstrap.meeting import (
    difference,
    gather_or_raise,
    refusal_of_another,
    status,
)
from jax_ub.runtime.bootstrap.process_all_gather import ProcessAllGather, Values
from jax_ub.runtime.device_groups import DeviceGroups, Group
from jax_ub.runtime.transports import transport_setup_of

# A death is to be known within 2 s.
_TOLD_WITHIN_S = 1.0


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

    def close(self) -> None:
        """Ends it, where a rank of the group lies here."""
        if self.communicator is not None:
            self.communicator.close()


class ConnectionAttempt:
    """What this process offers and makes until all have connected, or one has failed.

    Attributes:
        made: the groups that were connected, and those that cannot be.
        generation: the last that this process agreed on.
    """

    def __init__(
        self, device_groups: DeviceGroups, connected: Collection[Group], generation: int
    ):
        """Begins.

        Args:
            device_groups: where the ranks lie.
            connected: the groups that are connected already.
            generation: the last that this process agreed on.
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
        """Agrees with all processes of the mesh, and connects the groups that can be.

        Args:
            agreement: with whom; two rounds, three where the processes differ.
            agreed_settings: what must be the same everywhere, by name.
            own_error: why this process cannot go on, or None.

        Returns:
            What each process said of itself.

        Raises:
            CommunicatorError: if another process refused, differs, or could not
                connect; the own refusal, if there is one.
            TimeoutError: if processes were missing when the deadline passed.
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
            # Others may wait in vain for a connection before they come here.
            "failed": None if error is None else str(error),
            "reasons": {_key(one.group): one.reason for one in self.made if one.reason},
        }
        done = gather_or_raise(agreement, outcome, error, _patience_s(error))
        self._take_reasons(done)
        return error or _first_failure(done)

    def close(self) -> None:
        """Gives up what was offered and made: who keeps an error would keep both."""
        for connection in self.made:
            connection.close()
        self.made.clear()
        self._offered.clear()

    def _offer(self):
        try:
            # Needed wherever a call runs, so that all learn if it is missing.
            engine.check_isa()
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
        """Connects the groups, as far as that is possible.

        Args:
            peer_info: what each process said of itself; empty for one alone.

        Returns:
            Why it failed, or None.
        """
        try:
            for group in self._groups:
                self.made.append(self._connect(peer_info, group))
        except Exception as error:
            return self._gave_up(error)
        return None

    def _gave_up(self, error):
        self._offered.clear()  # so that others find closed sockets instead of waiting
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")

    def _introduction(self, agreed_settings, own_error):
        text = json.dumps(dict(agreed_settings), sort_keys=True)
        return {
            **status(own_error),
            "generation": self.generation + 1,
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "host": hosts.identity(),
            "cores": hosts.cores(),
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
        """What some process found out about a group holds for all."""
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
    # Higher than any that one of them had; a process alone agrees on none.
    return max((one["generation"] for one in peer_info.values()), default=0)


def _patience_s(error):
    """How long to wait for what the others say of their connections."""
    longest_s = 2 * settings.deadline_s()
    # Those that live hear of an error soon; whom it names may be dead.
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
