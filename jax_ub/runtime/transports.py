"""How groups of ranks get shared memory: over CPU processes, and over GPUs."""

from collections.abc import Mapping
from typing import Any, Protocol

from jax_ub.runtime import cuda, engine, hosts, settings
from jax_ub.runtime.place import Group, Place

# What each process told the others, and what it told them of one group.
Told = Mapping[int, Mapping[str, Any]]
Introduced = Mapping[int, Mapping[str, Any]]


class Wiring(Protocol):
    """What one kind of device needs to connect a group of ranks."""

    def groups(self, place: Place) -> list[Group]:
        """The groups that are connected, in the same order in every process."""

    def offer(self, place: Place, group: Group) -> Any:
        """Opens what the peers of a group in several processes connect to."""

    def introduce(self, offered: Any) -> dict[str, Any]:
        """What the peers need to know of it, in JSON's types."""

    def why_not(
        self, place: Place, group: Group, told: Told, introduced: Introduced
    ) -> str | None:
        """Why a group cannot be connected, the same in every process; None if it can.

        Args:
            place: where the ranks lie.
            group: which of them.
            told: what each process said of itself.
            introduced: what those with a rank of the group offered for it.
        """

    def connect(
        self,
        place: Place,
        group: Group,
        offered: Any,
        introduced: Introduced,
        generation: int,
    ) -> Any:
        """Makes the group's communicator.

        Args:
            place: where the ranks lie.
            group: which of them.
            offered: of this process; None where all ranks lie here.
            introduced: what the processes of the group offered for it.
            generation: of the communicator, the same in all of them.

        Raises:
            NotImplementedError: if the devices cannot share memory after all.
        """


class CpuWiring:
    """Processes of one host map each other's memory; a group of one needs nothing."""

    def groups(self, place):
        """Those in several processes."""
        return [group for group in place.groups if place.spans(group)]

    def offer(self, place, group):
        """A socket."""
        return engine.load().endpoint()

    def introduce(self, offered):
        """Where it listens."""
        return {"address": offered.address, "token": offered.token}

    def why_not(self, place, group, told, introduced):
        """Memory is shared on one host only."""
        by_host: dict[str, list[int]] = {}
        for process in sorted(set(place.processes_of(group))):
            by_host.setdefault(told[process]["host"], []).append(process)
        if len(by_host) == 1:
            return None
        names = [
            f"{hosts.short_name(host)} (processes {members})"
            for host, members in by_host.items()
        ]
        return f"its ranks span the hosts {' and '.join(names)}"

    def connect(self, place, group, offered, introduced, generation):
        """Maps the memory of all processes of the group."""
        peers = {p: one for p, one in introduced.items() if p != place.process}
        return engine.load().connect(
            offered,
            name=place.name,
            devices=list(group),
            processes=list(place.processes_of(group)),
            process=place.process,
            addresses={process: one["address"] for process, one in peers.items()},
            tokens={process: one["token"] for process, one in peers.items()},
            half_bytes=place.call_bytes,
            timeout_s=settings.deadline_s(),
            generation=generation,
        )


class CudaWiring:
    """Every group has a heap on each of its GPUs, which the devices of all reach."""

    def groups(self, place):
        """All; a rank alone needs nothing."""
        return [group for group in place.groups if len(group) > 1]

    def offer(self, place, group):
        """The heaps of the own ranks, and what this process can share them by.

        Or in words, why it has no engine.
        """
        return cuda.why_not() or cuda.load().endpoint(
            place.ordinals_of(group), place.call_bytes, hosts.identity()
        )

    def introduce(self, offered):
        """Where it listens, and the ways in which the heaps may be shared."""
        if isinstance(offered, str):
            return {"why_not": offered}
        return {
            "address": offered.address,
            "token": offered.token,
            "host": hosts.identity(),
            "offer": offered.offer,
        }

    def why_not(self, place, group, told, introduced):
        """What the engine concludes from all offers."""
        if not place.spans(group):
            return cuda.why_not()
        for process, one in sorted(introduced.items()):
            if "why_not" in one:
                return f"process {process} cannot: {one['why_not']}"
        offers = {process: one["offer"] for process, one in introduced.items()}
        processes = list(place.processes_of(group))
        return cuda.load().why_not_connected(processes, offers) or None

    def connect(self, place, group, offered, introduced, generation):
        """Maps the heaps of all ranks on each own device."""
        if offered is None:
            return cuda.load().connect_in_process(
                name=place.name,
                devices=list(group),
                ordinals=place.ordinals_of(group),
                slots_bytes=place.call_bytes,
            )
        own = introduced[place.process]["host"]
        near = {
            process: one
            for process, one in introduced.items()
            if process != place.process and one["host"] == own
        }
        return cuda.load().connect(
            offered,
            name=place.name,
            devices=list(group),
            processes=list(place.processes_of(group)),
            process=place.process,
            addresses={process: one["address"] for process, one in near.items()},
            tokens={process: one["token"] for process, one in near.items()},
            offers={process: one["offer"] for process, one in introduced.items()},
            timeout_s=settings.deadline_s(),
        )


class NoWiring:
    """A platform without an engine."""

    def __init__(self, platform: str):
        """Remembers which, for the reason."""
        self._platform = platform

    def groups(self, place):
        """Those that an engine would have to connect."""
        return [group for group in place.groups if place.spans(group)]

    def offer(self, place, group):
        """Nothing."""
        return None

    def introduce(self, offered):
        """Nothing."""
        return {}

    def why_not(self, place, group, told, introduced):
        """There is no engine."""
        return f"no engine for {self._platform}"

    def connect(self, place, group, offered, introduced, generation):
        """Is never asked to."""
        raise NotImplementedError(f"no engine for {self._platform}")


def wiring_of(platform: str) -> Wiring:
    """What connects ranks on devices of a platform."""
    if platform == "cpu":
        return CpuWiring()
    return CudaWiring() if platform == "cuda" else NoWiring(platform)
