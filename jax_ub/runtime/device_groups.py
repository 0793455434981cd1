"""Where the ranks of `initialize_ub` lie, and how much they may share."""

import dataclasses
from collections.abc import Mapping

Group = tuple[int, ...]  # global device ids, in the order of the ranks

# What a rank's share of a call needs at most, for each element of the capacity: f32
# partial sums and f32 results; and room for the starts of slots to be aligned.
_BYTES_PER_ELEMENT = 8
_SLACK_BYTES = 64 * 1024
_SLOT_ALIGNMENT_BYTES = 256
# What a rank sends in an all-reduce of few tokens on GPUs, in one exchange: up to this
# much to all peers together, where nothing was tuned. Two exchanges send 2 (P - 1) / P
# of the sum's bytes, one P - 1 times those, and saves a handshake: 6 us, `handshake_s`
# of the simulator, in which NVLink moves this much at 450 GB/s (H100). Neither was
# measured here.
ONE_SHOT_BYTES = 2_700_000


def heap_bytes(platform: str, num_elements: int) -> int:
    """Room for the slots of a call, where the capacity is so many elements."""
    least = ONE_SHOT_BYTES if platform == "cuda" else 0
    return max(_BYTES_PER_ELEMENT * num_elements, least)


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """Where the ranks of `initialize_ub` lie, as this process sees it."""

    groups: tuple[Group, ...]
    process_of: Mapping[int, int]  # by global device id
    process: int
    platform: str  # of the devices: "cpu", "cuda", ...
    capacity: int  # elements of a call, at most
    num_slots: int  # of a rank, at most
    name: str  # for errors
    # By global device id, of GPUs in this process.
    ordinals: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def processes(self) -> list[int]:
        """All processes with a rank."""
        return sorted({self.process_of[i] for group in self.groups for i in group})

    @property
    def call_bytes(self) -> int:
        """What a rank may share for one call."""
        slots = _SLOT_ALIGNMENT_BYTES * self.num_slots
        return heap_bytes(self.platform, self.capacity) + slots + _SLACK_BYTES

    def processes_of(self, group: Group) -> tuple[int, ...]:
        """The process of every rank."""
        return tuple(self.process_of[device] for device in group)

    def has_local_rank(self, group: Group) -> bool:
        """Whether a rank of the group lies in this process."""
        return self.process in self.processes_of(group)

    def spans_processes(self, group: Group) -> bool:
        """Whether the group lies in several processes."""
        return len(set(self.processes_of(group))) > 1

    def ordinals_of(self, group: Group) -> list[int]:
        """The ordinals of the group's own devices, in the order of the ranks."""
        own = (i for i in group if self.process_of[i] == self.process)
        return [self.ordinals[i] for i in own]
