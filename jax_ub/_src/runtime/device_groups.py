"""Which devices and processes are the ranks of one `initialize_ub` call."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

Group = tuple[int, ...]  # global device ids, in the order of the ranks
Key = tuple[str, Group]  # with the platform, because the ids of each begin at 0

# Shared memory of a rank, per element of the capacity: at most one f32 partial sum and
# one f32 result. The constants below add room for the alignment of slots.
_BYTES_PER_ELEMENT = 8
_SLACK_BYTES = 64 * 1024
_SLOT_ALIGNMENT_BYTES = 256
# Up to this many bytes, GPUs use a one-shot all-reduce, unless a tuned file decides. In
# it, each of P ranks sends its whole summand to all peers. The limit applies to what a
# rank sends to all peers together. For a sum of S bytes, that is S (P - 1) for
# one-shot, and 2 S (P - 1) / P for reduce-scatter and all-gather, which need another
# handshake. A handshake takes 6 us (`handshake_s` of the simulator), in which NVLink
# moves this many bytes at 450 GB/s (H100). Neither number was measured here.
ONE_SHOT_BYTES = 2_700_000


def heap_bytes(platform: str, num_elements: int) -> int:
    """Returns how many bytes of communication buffers a rank needs for any call.

    Args:
        platform: platform of the devices, such as "cpu" or "cuda".
        num_elements: capacity, the largest number of elements of a call.
    """
    least = ONE_SHOT_BYTES if platform == "cuda" else 0
    return max(_BYTES_PER_ELEMENT * num_elements, least)


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """The groups of devices that `initialize_ub` connects, and their processes.

    One rank is one device. A group has the ranks that communicate with each other, and
    belongs to one index of the other mesh axes.
    """

    groups: tuple[Group, ...]
    process_of: Mapping[int, int]  # process index by global device id
    process: int  # index of this process
    platform: str  # platform of the devices: "cpu", "cuda", ...
    capacity: int  # largest number of elements of a call
    num_slots: int  # largest number of slots of a rank
    name: str  # for errors
    # CUDA ordinals of this process's GPUs, by global device id.
    ordinals: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple((self.platform, group) for group in self.groups)

    @property
    def processes(self) -> list[int]:
        """Returns the indices of the processes that have a rank, in ascending order."""
        return sorted({self.process_of[i] for group in self.groups for i in group})

    @property
    def call_bytes(self) -> int:
        """Returns the size of a rank's memory that its peers can access, in bytes."""
        slots = _SLOT_ALIGNMENT_BYTES * self.num_slots
        return heap_bytes(self.platform, self.capacity) + slots + _SLACK_BYTES

    def processes_of(self, group: Group) -> tuple[int, ...]:
        """Returns the process index of each device in the group, in rank order."""
        return tuple(self.process_of[device] for device in group)

    def has_local_rank(self, group: Group) -> bool:
        return self.process in self.processes_of(group)

    def spans_processes(self, group: Group) -> bool:
        return len(set(self.processes_of(group))) > 1

    def ordinals_of(self, group: Group) -> list[int]:
        """Returns the CUDA ordinals of the group's devices in this process, by rank."""
        own = (i for i in group if self.process_of[i] == self.process)
        return [self.ordinals[i] for i in own]


def rank_groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axes: tuple[str, ...],
    values: Sequence[int],
) -> np.ndarray:
    """Arranges values, one per device of a mesh, in a table [groups, ranks].

    Args:
        mesh: the mesh.
        axes: the mesh axes of the ranks. Each index of the other axes is one group.
        values: one value per device, in the order of `mesh.devices.flat`.
    """
    table = np.asarray(values, np.int64).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    # Moves the axes of the ranks to the end, so that each row is a group in rank order.
    moved = np.moveaxis(table, places, range(-len(axes), 0))
    return moved.reshape(-1, math.prod(moved.shape[-len(axes) :]))
