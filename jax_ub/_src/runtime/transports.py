"""Lets the ranks of a group access each other's memory, on CPUs or GPUs."""

from collections.abc import Mapping
from typing import Any

from jax_ub._src.runtime import cpu_engine, cuda_engine, hosts, settings
from jax_ub._src.runtime.communicators import DeviceGroups, Group

# The return values of `TransportSetup.endpoint_info` in all processes, by process
# index.
EndpointInfos = Mapping[int, Mapping[str, Any]]


class TransportSetup:
    """Connects groups of ranks by shared memory, for one platform.

    This base class rejects all groups with a reason, since the platform has no engine.
    """

    def __init__(self, device_groups: DeviceGroups, reason: str = ""):
        self._device_groups = device_groups
        self._reason = reason

    def groups(self) -> list[Group]:
        """Returns the groups to connect, in the same order in every process.

        By default, groups within one process need no connection.
        """
        groups = self._device_groups
        return list(filter(groups.spans_processes, groups.groups))

    def open_endpoint(self, group: Group) -> Any:
        """Opens the socket to which peers of other processes connect."""
        return None

    def endpoint_info(self, endpoint: Any) -> dict[str, Any]:
        """Returns the address of an endpoint, as JSON values for the peers."""
        if endpoint is None:
            return {}
        return {
            "address": endpoint.address,
            "token": endpoint.token,
            "host": hosts.identity(),
        }

    def why_not(self, group: Group, infos: EndpointInfos) -> str | None:
        """Returns why the ranks of a group cannot share memory, or None if they can.

        The result is the same in every process.
        """
        return self._reason

    def connect(
        self, group: Group, endpoint: Any, infos: EndpointInfos, generation: int
    ) -> Any:
        """Connects the processes of a group, and returns the communicator.

        Args:
            group: the group to connect.
            endpoint: endpoint of this process; None if all ranks are in this process.
            infos: empty if all ranks are in this process.
            generation: communicator generation, the same in all processes.

        Raises:
            NotImplementedError: if mapping the memory shows that the devices cannot
                share it.
        """
        raise NotImplementedError(self._reason)  # never called: why_not has a reason

    def _shared_arguments(self, group, infos):
        """Returns the arguments that `connect` takes in both engines, CPU and CUDA."""
        own = self._device_groups.process
        peers = {process: info for process, info in infos.items() if process != own}
        return {
            "name": self._device_groups.name,
            "devices": list(group),
            "processes": list(self._device_groups.processes_of(group)),
            "process": own,
            "addresses": {process: info["address"] for process, info in peers.items()},
            "tokens": {process: info["token"] for process, info in peers.items()},
            "timeout_s": settings.timeout_s(),
        }


class CpuTransportSetup(TransportSetup):
    """Connects processes of one host by CPU memory that all of them map."""

    def open_endpoint(self, group):
        return cpu_engine.load().endpoint()

    def why_not(self, group, infos):
        """Returns why the group cannot share memory, or None if it can.

        All its processes must be on one host.
        """
        by_host: dict[str, list[int]] = {}
        for process, info in sorted(infos.items()):
            by_host.setdefault(info["host"], []).append(process)
        if len(by_host) == 1:
            return None
        names = [
            f"{hosts.short_name(host)} (processes {members})"
            for host, members in by_host.items()
        ]
        return f"its ranks span the hosts {' and '.join(names)}"

    def connect(self, group, endpoint, infos, generation):
        """Maps the shared memory of all processes of the group in this process."""
        return cpu_engine.load().connect(
            endpoint,
            **self._shared_arguments(group, infos),
            buffer_bytes=self._device_groups.call_bytes,
            generation=generation,
        )


class CudaTransportSetup(TransportSetup):
    """Connects GPUs by memory that each GPU allocates and all other GPUs map."""

    def groups(self):
        return [group for group in self._device_groups.groups if len(group) > 1]

    def open_endpoint(self, group):
        """Allocates the memory that this process's GPUs share with their peers.

        Returns:
            The endpoint, or the reason as a string if the CUDA engine cannot run here.
        """
        return cuda_engine.why_not() or cuda_engine.load().endpoint(
            self._device_groups.ordinals_of(group),
            self._device_groups.call_bytes,
            hosts.identity(),
        )

    def endpoint_info(self, endpoint):
        """Returns the endpoint's address, secret token and memory sharing modes."""
        if isinstance(endpoint, str):
            return {"why_not": endpoint}
        return {
            **super().endpoint_info(endpoint),
            "capabilities": endpoint.capabilities,
        }

    def why_not(self, group, infos):
        """Returns why the group's GPUs cannot share memory, or None if they can."""
        if not self._device_groups.spans_processes(group):
            return cuda_engine.why_not()
        for process, info in sorted(infos.items()):
            if "why_not" in info:
                return f"process {process} cannot connect: {info['why_not']}"
        processes = list(self._device_groups.processes_of(group))
        capabilities = _capabilities(infos)
        return cuda_engine.load().why_not_connected(processes, capabilities) or None

    def connect(self, group, endpoint, infos, generation):
        """Maps the memory heaps of all ranks on each GPU of this process."""
        if endpoint is None:
            return cuda_engine.load().connect_in_process(
                name=self._device_groups.name,
                devices=list(group),
                ordinals=self._device_groups.ordinals_of(group),
                slots_bytes=self._device_groups.call_bytes,
            )
        own_host = infos[self._device_groups.process]["host"]
        on_host = {p: info for p, info in infos.items() if info["host"] == own_host}
        return cuda_engine.load().connect(
            endpoint,
            **self._shared_arguments(group, on_host),
            capabilities=_capabilities(infos),
        )


def _capabilities(infos):
    return {process: info["capabilities"] for process, info in infos.items()}


def transport_setup_of(device_groups: DeviceGroups) -> TransportSetup:
    """Returns the object that connects groups of ranks on their platform."""
    platform = device_groups.platform
    if platform == "cuda":
        return CudaTransportSetup(device_groups)
    reason = cpu_engine.why_not() if platform == "cpu" else f"no engine for {platform}"
    if reason is not None:
        return TransportSetup(device_groups, reason)
    return CpuTransportSetup(device_groups)
