"""Lets the ranks of a group access each other's memory, on CPUs or GPUs."""

from collections.abc import Mapping
from typing import Any

from jax_ub._src.runtime import cpu_engine, cuda_engine, hosts, settings
from jax_ub._src.runtime.device_groups import DeviceGroups, Group

# What processes tell each other in the handshake, by process: `PeerInfo` about the
# process, and `EndpointInfos` about its endpoint for one group.
PeerInfo = Mapping[int, Mapping[str, Any]]
EndpointInfos = Mapping[int, Mapping[str, Any]]


class TransportSetup:
    """Base class: connects groups of ranks by shared memory, for one platform.

    A subclass connects them. This class rejects all groups with a reason, since the
    platform has no engine.
    """

    def __init__(self, reason: str = ""):
        self._reason = reason

    def groups(self, device_groups: DeviceGroups) -> list[Group]:
        """Returns the groups to connect, in the same order in every process.

        By default, groups within one process need no connection.
        """
        return [g for g in device_groups.groups if device_groups.spans_processes(g)]

    def open_endpoint(self, device_groups: DeviceGroups, group: Group) -> Any:
        """Opens the socket to which peers of other processes connect."""
        return None

    def endpoint_info(self, endpoint: Any) -> dict[str, Any]:
        """Returns the address of an endpoint, as JSON values for the peers."""
        return {}

    def why_not(
        self,
        device_groups: DeviceGroups,
        group: Group,
        peer_info: PeerInfo,
        endpoint_infos: EndpointInfos,
    ) -> str | None:
        """Returns why the ranks of a group cannot share memory, or None if they can.

        The result is the same in every process.

        Args:
            device_groups: all groups of ranks, and the process of each device.
            group: the group to connect.
            peer_info: handshake values, by process.
            endpoint_infos: `endpoint_info` of each process with a rank of the group.
        """
        return self._reason

    def connect(
        self,
        device_groups: DeviceGroups,
        group: Group,
        endpoint: Any,
        endpoint_infos: EndpointInfos,
        generation: int,
    ) -> Any:
        """Connects the processes of a group, and returns the communicator.

        Args:
            device_groups: all groups of ranks, and the process of each device.
            group: the group to connect.
            endpoint: endpoint of this process; None if all ranks are in this process.
            endpoint_infos: `endpoint_info` of each process with a rank of the group.
            generation: communicator generation, the same in all processes.

        Raises:
            NotImplementedError: if mapping the memory shows that the devices cannot
                share it.
        """
        raise NotImplementedError(self._reason)  # never called: why_not has a reason


class CpuTransportSetup(TransportSetup):
    """Connects processes of one host by CPU memory that they map from each other."""

    def open_endpoint(self, device_groups, group):
        return cpu_engine.load().endpoint()

    def endpoint_info(self, endpoint):
        return {"address": endpoint.address, "token": endpoint.token}

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Returns why the group cannot share memory, or None if it can.

        All its processes must be on one host.
        """
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

    def connect(self, device_groups, group, endpoint, endpoint_infos, generation):
        """Maps the shared memory of all processes of the group in this process."""
        return cpu_engine.load().connect(
            endpoint,
            **_shared_arguments(device_groups, group, endpoint_infos),
            half_bytes=device_groups.call_bytes,
            generation=generation,
        )


class CudaTransportSetup(TransportSetup):
    """Connects GPUs by memory that each GPU allocates and the others map."""

    def groups(self, device_groups):
        return [group for group in device_groups.groups if len(group) > 1]

    def open_endpoint(self, device_groups, group):
        """Allocates the memory that this process's GPUs share with their peers.

        Returns:
            The endpoint, or the reason as a string if the CUDA engine cannot run here.
        """
        return cuda_engine.why_not() or cuda_engine.load().endpoint(
            device_groups.ordinals_of(group), device_groups.call_bytes, hosts.identity()
        )

    def endpoint_info(self, endpoint):
        """Returns the endpoint's address, secret token and memory sharing modes."""
        if isinstance(endpoint, str):
            return {"why_not": endpoint}
        return {
            "address": endpoint.address,
            "token": endpoint.token,
            "host": hosts.identity(),
            "offer": endpoint.offer,
        }

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Returns why the group's GPUs cannot share memory, or None if they can."""
        if not device_groups.spans_processes(group):
            return cuda_engine.why_not()
        for process, info in sorted(endpoint_infos.items()):
            if "why_not" in info:
                return f"process {process} cannot connect: {info['why_not']}"
        offers = {process: info["offer"] for process, info in endpoint_infos.items()}
        processes = list(device_groups.processes_of(group))
        return cuda_engine.load().why_not_connected(processes, offers) or None

    def connect(self, device_groups, group, endpoint, endpoint_infos, generation):
        """Maps the heaps (shared memory) of all ranks on each GPU of this process."""
        if endpoint is None:
            return cuda_engine.load().connect_in_process(
                name=device_groups.name,
                devices=list(group),
                ordinals=device_groups.ordinals_of(group),
                slots_bytes=device_groups.call_bytes,
            )
        own_host = endpoint_infos[device_groups.process]["host"]
        on_host = {
            p: info for p, info in endpoint_infos.items() if info["host"] == own_host
        }
        return cuda_engine.load().connect(
            endpoint,
            **_shared_arguments(device_groups, group, on_host),
            offers={process: info["offer"] for process, info in endpoint_infos.items()},
        )


def _shared_arguments(device_groups, group, endpoint_infos):
    """Returns the arguments that `connect` takes in both engines, CPU and CUDA."""
    own = device_groups.process
    peers = {
        process: info for process, info in endpoint_infos.items() if process != own
    }
    return {
        "name": device_groups.name,
        "devices": list(group),
        "processes": list(device_groups.processes_of(group)),
        "process": own,
        "addresses": {process: info["address"] for process, info in peers.items()},
        "tokens": {process: info["token"] for process, info in peers.items()},
        "timeout_s": settings.deadline_s(),
    }


def transport_setup_of(platform: str) -> TransportSetup:
    """Returns how ranks on a JAX platform connect, or why they cannot."""
    if platform == "cuda":
        return CudaTransportSetup()
    reason = cpu_engine.why_not() if platform == "cpu" else f"no engine for {platform}"
    return CpuTransportSetup() if reason is None else TransportSetup(reason)
