"""Connects the groups of ranks of `initialize_ub`, jointly in all processes."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jax_ub._src import errors
from jax_ub._src.errors import CommunicatorError
from jax_ub._src.runtime import communicators, cpu_engine, hosts, settings
from jax_ub._src.runtime.communicators import Connection, DeviceGroups, Group
from jax_ub._src.runtime.process_all_gather import ProcessAllGather, Values
from jax_ub._src.runtime.transports import transport_setup_of

# Seconds for which a process waits for its peers after an error in its own connections.
# The time is short, because the death of a process must be reported within 2 s.
_TIMEOUT_AFTER_ERROR_S = 1.0

_generation = 0  # the last communicator generation that this process agreed on


def connect(
    device_groups: DeviceGroups,
    all_gather: ProcessAllGather,
    agreed_settings: Mapping[str, str],
) -> None:
    """Connects groups of ranks by shared memory; all processes must make this call.

    An error of one process is raised in all processes.

    Args:
        device_groups: the groups of ranks, and the process of each device.
        all_gather: all-gathers values over the processes: in two rounds, or in three if
            their settings differ.
        agreed_settings: settings that must be equal in all processes, by name.

    Raises:
        CommunicatorError: if another process failed, has different settings, or could
            not connect, or if there is not enough memory.
        TimeoutError: if processes did not arrive before the deadline.
    """
    attempt = ConnectionAttempt(device_groups)
    try:
        peer_info = attempt.connect_jointly(all_gather, agreed_settings)
    except BaseException:  # also KeyboardInterrupt: nothing else holds `attempt.made`
        attempt.close()
        raise
    communicators.add(attempt.made)
    if device_groups.platform == "cpu" and len(peer_info) > 1:
        _share_cores(device_groups, peer_info)


def _share_cores(device_groups, peer_info: Values):
    """Divides the host's cores among its processes; limits this process to its part."""
    if settings.num_threads() is not None or cpu_engine.why_not() is not None:
        return
    host, own_cores = hosts.identity(), hosts.cores()
    on_host = {p: info for p, info in sorted(peer_info.items()) if info["host"] == host}
    cores = [info["cores"] for info in on_host.values()]
    control_groups = [info["control_groups"] for info in on_host.values()]
    index = list(on_host).index(device_groups.process)
    num_threads = hosts.thread_share(own_cores, cores)
    alone = cpu_engine.load().default_num_threads()
    if alone < len(own_cores):  # a CPU quota, which the control group shares
        num_sharing_quota = control_groups.count(control_groups[index])
        num_threads = min(num_threads, max(1, alone // num_sharing_quota))
    cpu_set = hosts.process_cpu_set(own_cores, cores, index)
    communicators.limit_cores(len(on_host), num_threads, cpu_set)


class ConnectionAttempt:
    """Connects this process's groups of ranks; after an error, closes all of them.

    The attempt ends when all processes have connected, or one has failed.

    Attributes:
        made: the connections, including those of groups that cannot be connected.
    """

    def __init__(self, device_groups: DeviceGroups):
        """Selects the groups of ranks that have no connection yet."""
        self.made: list[Connection] = []
        self._device_groups = device_groups
        self._setup = transport_setup_of(device_groups)
        self._endpoints: dict[Group, Any] = {}
        connected = {one.key for one in communicators.connections()}
        groups = self._setup.groups()
        platform = device_groups.platform
        self._groups = [g for g in groups if (platform, g) not in connected]

    def connect_jointly(
        self, all_gather: ProcessAllGather, agreed_settings: Mapping[str, str]
    ) -> Values:
        """Implements `connect`; returns the handshake values by process index."""
        global _generation
        error = self._open_endpoints()
        peer_info = all_gather.gather(self._handshake(agreed_settings), error)
        # Each process proposes the generation number after the last number that it has
        # used. So no process has used the maximum of the proposals.
        _generation = max(one["generation"] for one in peer_info.values())
        if len({one["hash"] for one in peer_info.values()}) > 1:
            settings_of = all_gather.gather(dict(agreed_settings))
            all_gather.gather(None, _difference(settings_of))
        error = self.connect_all(peer_info)
        reasons = {str(one.group): one.reason for one in self.made if one.reason}
        # The timeout is doubled, because a peer may wait one timeout for a connection
        # before it sends its outcome. After an error of this process, a short timeout
        # is enough: the process has closed its sockets, so that running peers fail at
        # once and send their outcomes.
        timeout_s = 2 * settings.timeout_s()
        if error is not None:
            timeout_s = min(timeout_s, _TIMEOUT_AFTER_ERROR_S)
        found = all_gather.gather(reasons, error, timeout_s=timeout_s)
        self._close_unconnected(found)
        return peer_info

    def connect_all(self, peer_info: Values) -> Exception | None:
        """Connects this process's groups whose ranks can share memory.

        Returns the error, or None. `peer_info` has the handshake values by process.
        """
        try:
            for group in self._groups:
                self.made.append(self._connect(peer_info, group))
        except Exception as error:
            return self._give_up(error)
        return None

    def close(self) -> None:
        """Closes all connections and listening endpoints that this attempt has opened.

        They are closed explicitly because the traceback of an error may keep this
        object alive.
        """
        for connection in self.made:
            connection.close()
        self.made.clear()
        self._endpoints.clear()

    def _open_endpoints(self):
        try:
            groups = self._device_groups
            for group in self._groups:
                if groups.spans_processes(group) and groups.has_local_rank(group):
                    # This check runs before any process connects, so that all processes
                    # get the error if the engine has no kernels for the instruction set
                    # `JAX_UB_ISA`.
                    cpu_engine.check_isa()
                    self._endpoints[group] = self._setup.open_endpoint(group)
        except Exception as error:
            return self._give_up(error)
        return None

    def _handshake(self, agreed_settings):
        text = json.dumps(dict(agreed_settings), sort_keys=True)
        return {
            "generation": _generation + 1,
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "host": hosts.identity(),
            "cores": hosts.cores(),
            "control_groups": hosts.control_groups(),
            "endpoints": {
                str(group): self._setup.endpoint_info(endpoint)
                for group, endpoint in self._endpoints.items()
            },
        }

    def _give_up(self, error):
        self._endpoints.clear()  # closes the sockets, so that peers fail at once
        return errors.of_engine(error) or CommunicatorError(f"initialize_ub: {error}")

    def _connect(self, peer_info, group) -> Connection:
        groups = self._device_groups
        processes = groups.processes_of(group)
        spans_processes = groups.spans_processes(group)
        infos = {
            process: peer_info[process]["endpoints"].get(str(group), {})
            for process in (set(processes) if spans_processes else ())
        }
        reason = self._setup.why_not(group, infos)
        communicator = None
        if reason is None and groups.has_local_rank(group):
            endpoint = self._endpoints.pop(group) if spans_processes else None
            try:
                communicator = self._setup.connect(group, endpoint, infos, _generation)
            except NotImplementedError as error:
                reason = str(error)
        return Connection(
            *(group, groups.platform, processes, reason, communicator),
            generation=_generation,
            call_bytes=groups.call_bytes,
            client=groups.client,
        )

    def _close_unconnected(self, reasons_of: Values):
        """Closes each group of ranks that some process could not connect."""
        reasons: dict[str, str] = {}
        for _, own in sorted(reasons_of.items()):
            reasons = {**own, **reasons}
        for i, connection in enumerate(self.made):
            reason = connection.reason or reasons.get(str(connection.group))
            if reason is not None:
                connection.close()
                self.made[i] = dataclasses.replace(
                    connection, reason=reason, communicator=None
                )


def _difference(settings_of: Values):
    """Returns an error that names two processes whose settings differ, or None."""
    first = min(settings_of)
    for name in dict.fromkeys(name for one in settings_of.values() for name in one):
        for process, one in sorted(settings_of.items()):
            own, other = settings_of[first].get(name), one.get(name)
            if own != other:
                return CommunicatorError(
                    f"initialize_ub: the processes differ in {name}: process {first} "
                    f"has {own}, process {process} has {other}. Pass the same in all "
                    "processes."
                )
    return None
