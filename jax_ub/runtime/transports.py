"""Sets up the shared memory of a group of ranks, on CPUs and on GPUs."""

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ub.runtime import cuda, engine, hosts, settings
from jax_ub.runtime.device_groups import DeviceGroups, Group

# Handshake values by process: `PeerInfo` for the process, `EndpointInfos` for its
# endpoint of one group.
PeerInfo = Mapping[int, Mapping[str, Any]]
EndpointInfos = Mapping[int, Mapping[str, Any]]


class TransportSetup(Protocol):
    """Connects groups of ranks on one kind of device."""

    def groups(self, device_groups: DeviceGroups) -> list[Group]:
        """Returns the groups to connect, in the same order in every process."""

    def open_endpoint(self, device_groups: DeviceGroups, group: Group) -> Any:
        """Opens the endpoint that the peers of a multi-process group connect to."""

    def endpoint_info(self, offered: Any) -> dict[str, Any]:
        """Returns what the peers need to connect to an endpoint, as JSON values."""

    def why_not(
        self,
        device_groups: DeviceGroups,
        group: Group,
        peer_info: PeerInfo,
        endpoint_infos: EndpointInfos,
    ) -> str | None:
        """Returns why a group cannot be connected, or None if it can.

        The result is the same in every process.

        Args:
            device_groups: all groups of ranks, and the process of each device.
            group: the group to connect.
            peer_info: handshake values, by process.
            endpoint_infos: `endpoint_info` of each process with a rank of the group.
        """

    def connect(
        self,
        device_groups: DeviceGroups,
        group: Group,
        offered: Any,
        endpoint_infos: EndpointInfos,
        generation: int,
    ) -> Any:
        """Creates the group's communicator.

        Args:
            device_groups: all groups of ranks, and the process of each device.
            group: the group to connect.
            offered: endpoint of this process; None if all ranks are in this process.
            endpoint_infos: `endpoint_info` of each process with a rank of the group.
            generation: communicator generation, the same in all processes.

        Raises:
            NotImplementedError: if mapping the memory shows that the devices cannot
                share it.
        """


class CpuTransportSetup:
    """Lets the processes of a group on one host map each other's memory.

    Groups within one process need no connection.
    """

    def groups(self, device_groups):
        """Returns the groups that span several processes."""
        return [
            group
            for group in device_groups.groups
            if device_groups.spans_processes(group)
        ]

    def open_endpoint(self, device_groups, group):
        """Opens a listening socket."""
        return engine.load().endpoint()

    def endpoint_info(self, offered):
        """Returns the socket's address, and the token that peers must present."""
        return {"address": offered.address, "token": offered.token}

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Rejects groups that span several hosts."""
        by_host: dict[str, list[int]] = {}
        for process in sorted(set(device_groups.processes_of(group))):
            by_host.setdefault(peer_info[process]["host"], []).append(process)
        if len(by_host) == 1:
            return None
        names = [
            f"{hosts.short_name(host)} (processes {members})"
            for host, members in by_host.items()
        ]
        return f"its ranks span the hosts {' and '.join(names)}"

    def connect(self, device_groups, group, offered, endpoint_infos, generation):
        """Maps the shared memory of all processes of the group."""
        peers = {
            p: one for p, one in endpoint_infos.items() if p != device_groups.process
        }
        return engine.load().connect(
            offered,
            name=device_groups.name,
            devices=list(group),
            processes=list(device_groups.processes_of(group)),
            process=device_groups.process,
            addresses={process: one["address"] for process, one in peers.items()},
            tokens={process: one["token"] for process, one in peers.items()},
            half_bytes=device_groups.call_bytes,
            timeout_s=settings.deadline_s(),
            generation=generation,
        )


class CudaTransportSetup:
    """Allocates a heap on each GPU of a group, and maps it on all GPUs of the group."""

    def groups(self, device_groups):
        """Returns the groups of at least two ranks."""
        return [group for group in device_groups.groups if len(group) > 1]

    def open_endpoint(self, device_groups, group):
        """Allocates the heaps of the local ranks.

        Returns:
            The endpoint, or the reason as a string if the CUDA engine cannot run here.
        """
        return cuda.why_not() or cuda.load().endpoint(
            device_groups.ordinals_of(group), device_groups.call_bytes, hosts.identity()
        )

    def endpoint_info(self, offered):
        """Returns the endpoint's address and token, and how its heaps can be shared."""
        if isinstance(offered, str):
            return {"why_not": offered}
        return {
            "address": offered.address,
            "token": offered.token,
            "host": hosts.identity(),
            "offer": offered.offer,
        }

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Returns the reason that the engine derives from all capabilities."""
        if not device_groups.spans_processes(group):
            return cuda.why_not()
        for process, one in sorted(endpoint_infos.items()):
            if "why_not" in one:
                return f"process {process} cannot: {one['why_not']}"
        offers = {process: one["offer"] for process, one in endpoint_infos.items()}
        processes = list(device_groups.processes_of(group))
        return cuda.load().why_not_connected(processes, offers) or None

    def connect(self, device_groups, group, offered, endpoint_infos, generation):
        """Maps the heaps of all ranks on each local device."""
        if offered is None:
            return cuda.load().connect_in_process(
                name=device_groups.name,
                devices=list(group),
                ordinals=device_groups.ordinals_of(group),
                slots_bytes=device_groups.call_bytes,
            )
        own = endpoint_infos[device_groups.process]["host"]
        near = {
            process: one
            for process, one in endpoint_infos.items()
            if process != device_groups.process and one["host"] == own
        }
        return cuda.load().connect(
            offered,
            name=device_groups.name,
            devices=list(group),
            processes=list(device_groups.processes_of(group)),
            process=device_groups.process,
            addresses={process: one["address"] for process, one in near.items()},
            tokens={process: one["token"] for process, one in near.items()},
            offers={process: one["offer"] for process, one in endpoint_infos.items()},
            timeout_s=settings.deadline_s(),
        )


class NoTransportSetup:
    """Rejects all groups, on a platform without an engine."""

    def __init__(self, platform: str):
        """Stores the platform's name for the reason."""
        self._platform = platform

    def groups(self, device_groups):
        """Returns the groups that span several processes."""
        return [
            group
            for group in device_groups.groups
            if device_groups.spans_processes(group)
        ]

    def open_endpoint(self, device_groups, group):
        """Returns None: there is no endpoint."""
        return None

    def endpoint_info(self, offered):
        """Returns an empty dictionary: peers cannot connect."""
        return {}

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Returns that the platform has no engine."""
        return f"no engine for {self._platform}"

    def connect(self, device_groups, group, offered, endpoint_infos, generation):
        """Raises an error. It is never called, since `why_not` rejects every group."""
        raise NotImplementedError(f"no engine for {self._platform}")


def transport_setup_of(platform: str) -> TransportSetup:
    """Returns the transport setup for the devices of a platform."""
    if platform == "cpu":
        return CpuTransportSetup()
    return CudaTransportSetup() if platform == "cuda" else NoTransportSetup(platform)
