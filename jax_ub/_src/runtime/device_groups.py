"""Which devices and processes are the ranks of one `initialize_ub` call."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

Group = tuple[int, ...]  # global device ids, in the order of the ranks

# Upper bound of a rank's shared memory per element of the capacity: one f32 partial sum
# and one f32 result. The constants below add room for aligning the slots.
_BYTES_PER_ELEMENT = 8
_SLACK_BYTES = 64 * 1024
_SLOT_ALIGNMENT_BYTES = 256
# Upper bound of the bytes that a rank sends to all peers together in a one-shot
# all-reduce on GPUs, unless a tuned choice applies. For a sum of S bytes, a rank sends
# 2 S (P - 1) / P in the two exchanges of reduce-scatter and all-gather, but S (P - 1)
# in the single exchange of one-shot, which saves a handshake. A handshake takes 6 us
# (`handshake_s` of the simulator), in which NVLink moves this many bytes at 450 GB/s
# (H100). Neither number was measured here.
ONE_SHOT_BYTES = 2_700_000


def heap_bytes(platform: str, num_elements: int) -> int:
    """Returns the maximum bytes that the buffers (slots) of one call need on a rank.

    Args:
        platform: platform of the devices, such as "cpu" or "cuda".
        num_elements: capacity, the largest number of elements of a call.
    """
    least = ONE_SHOT_BYTES if platform == "cuda" else 0
    return max(_BYTES_PER_ELEMENT * num_elements, least)


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """The groups of devices that `initialize_ub` connects, with their processes.

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
    # Maps the global device ids of this process's GPUs to their CUDA ordinals.
    ordinals: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def processes(self) -> list[int]:
        """Returns the processes that have at least one rank, in ascending order."""
        return sorted({self.process_of[i] for group in self.groups for i in group})

    @property
    def call_bytes(self) -> int:
        """Returns the bytes that a rank shares with its peers to run one call."""
        slots = _SLOT_ALIGNMENT_BYTES * self.num_slots
        return heap_bytes(self.platform, self.capacity) + slots + _SLACK_BYTES

    def processes_of(self, group: Group) -> tuple[int, ...]:
        """Returns the process index of each rank of the group, in rank order."""
        return tuple(self.process_of[device] for device in group)

    def has_local_rank(self, group: Group) -> bool:
        """Returns whether a device of the group belongs to this process."""
        return self.process in self.processes_of(group)

    def spans_processes(self, group: Group) -> bool:
        """Returns whether the devices of the group belong to several processes."""
        return len(set(self.processes_of(group))) > 1

    def ordinals_of(self, group: Group) -> list[int]:
        """Returns the CUDA ordinals of the group's local devices, in rank order."""
        own = (i for i in group if self.process_of[i] == self.process)
        return [self.ordinals[i] for i in own]


def rank_groups(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axes: tuple[str, ...],
    values: Sequence[int],
) -> np.ndarray:
    """Arranges one value per device of a mesh in a table [groups, ranks].

    Args:
        mesh: the mesh.
        axes: the mesh axes of the ranks. Each index of the other axes is one group.
        values: one value per device, in the order of `mesh.devices.flat`.
    """
    table = np.asarray(values, np.int64).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    # The axes of the ranks come last, so that each row is one group, in rank order.
    moved = np.moveaxis(table, places, range(-len(axes), 0))
    return moved.reshape(-1, math.prod(moved.shape[-len(axes) :]))
