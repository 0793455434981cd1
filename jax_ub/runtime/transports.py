"""How groups of ranks get shared memory: over CPU processes, and over GPUs."""

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ub.runtime import cuda, engine, hosts, settings
from jax_ub.runtime.device_groups import DeviceGroups, Group

# What each process told the others, and what it told them of one group.
PeerInfo = Mapping[int, Mapping[str, Any]]
EndpointInfos = Mapping[int, Mapping[str, Any]]


class TransportSetup(Protocol):
    """What one kind of device needs to connect a group of ranks."""

    def groups(self, device_groups: DeviceGroups) -> list[Group]:
        """The groups that are connected, in the same order in every process."""

    def open_endpoint(self, device_groups: DeviceGroups, group: Group) -> Any:
        """Opens what the peers of a group in several processes connect to."""

    def endpoint_info(self, offered: Any) -> dict[str, Any]:
        """What the peers need to know of it, in JSON's types."""

    def why_not(
        self,
        device_groups: DeviceGroups,
        group: Group,
        peer_info: PeerInfo,
        endpoint_infos: EndpointInfos,
    ) -> str | None:
        """Why a group cannot be connected, the same in every process; None if it can.

        Args:
            device_groups: where the ranks lie.
            group: which of them.
            peer_info: what each process said of itself.
            endpoint_infos: what those with a rank of the group offered for it.
        """

    def connect(
        self,
        device_groups: DeviceGroups,
        group: Group,
        offered: Any,
        endpoint_infos: EndpointInfos,
        generation: int,
    ) -> Any:
        """Makes the group's communicator.

        Args:
            device_groups: where the ranks lie.
            group: which of them.
            offered: of this process; None where all ranks lie here.
            endpoint_infos: what the processes of the group offered for it.
            generation: of the communicator, the same in all of them.

        Raises:
            NotImplementedError: if the devices cannot share memory after all.
        """


class CpuTransportSetup:
    """Processes of one host map each other's memory; a group of one needs nothing."""

    def groups(self, device_groups):
        """Those in several processes."""
        return [
            group
            for group in device_groups.groups
            if device_groups.spans_processes(group)
        ]

    def open_endpoint(self, device_groups, group):
        """A socket."""
        return engine.load().endpoint()

    def endpoint_info(self, offered):
        """Where it listens."""
        return {"address": offered.address, "token": offered.token}

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """Memory is shared on one host only."""
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
        """Maps the memory of all processes of the group."""
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
    """Every group has a heap on each of its GPUs, which the devices of all reach."""

    def groups(self, device_groups):
        """All; a rank alone needs nothing."""
        return [group for group in device_groups.groups if len(group) > 1]

    def open_endpoint(self, device_groups, group):
        """The heaps of the own ranks, and what this process can share them by.

        Or in words, why it has no engine.
        """
        return cuda.why_not() or cuda.load().endpoint(
            device_groups.ordinals_of(group), device_groups.call_bytes, hosts.identity()
        )

    def endpoint_info(self, offered):
        """Where it listens, and the ways in which the heaps may be shared."""
        if isinstance(offered, str):
            return {"why_not": offered}
        return {
            "address": offered.address,
            "token": offered.token,
            "host": hosts.identity(),
            "offer": offered.open_endpoint,
        }

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """What the engine concludes from all offers."""
        if not device_groups.spans_processes(group):
            return cuda.why_not()
        for process, one in sorted(endpoint_infos.items()):
            if "why_not" in one:
                return f"process {process} cannot: {one['why_not']}"
        offers = {process: one["offer"] for process, one in endpoint_infos.items()}
        processes = list(device_groups.processes_of(group))
        return cuda.load().why_not_connected(processes, offers) or None

    def connect(self, device_groups, group, offered, endpoint_infos, generation):
        """Maps the heaps of all ranks on each own device."""
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
    """A platform without an engine."""

    def __init__(self, platform: str):
        """Remembers which, for the reason."""
        self._platform = platform

    def groups(self, device_groups):
        """Those that an engine would have to connect."""
        return [
            group
            for group in device_groups.groups
            if device_groups.spans_processes(group)
        ]

    def open_endpoint(self, device_groups, group):
        """Nothing."""
        return None

    def endpoint_info(self, offered):
        """Nothing."""
        return {}

    def why_not(self, device_groups, group, peer_info, endpoint_infos):
        """There is no engine."""
        return f"no engine for {self._platform}"

    def connect(self, device_groups, group, offered, endpoint_infos, generation):
        """Is never asked to."""
        raise NotImplementedError(f"no engine for {self._platform}")


def transport_setup_of(platform: str) -> TransportSetup:
    """What connects ranks on devices of a platform."""
    if platform == "cpu":
        return CpuTransportSetup()
    return CudaTransportSetup() if platform == "cuda" else NoTransportSetup(platform)
