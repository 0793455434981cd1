"""Reports the memory of communication buffers: `ub.memory_report()`."""

import dataclasses
import math
from collections.abc import Mapping

from jax_ub._src.config import ub_cfgs
from jax_ub._src.output import format_bytes, format_table
from jax_ub._src.runtime import (
    communicators,
    cpu_engine,
    cuda_engine,
    registry,
    settings,
)
from jax_ub._src.runtime.communicators import Key
from jax_ub._src.runtime.registry import InitializedAxis, Overlap


@dataclasses.dataclass(frozen=True)
class AxisMemory:
    """The sizes of the communication buffers of one initialized mesh axis.

    Attributes:
        axis_name: the mesh axis.
        tp_size: P, the number of ranks.
        shape: the capacity, `[T, H]`.
        overlaps: the named overlaps that use the buffers, each with its `size_bytes` at
            capacity.
        num_ranks: the number of ranks in this process.
        shared_bytes: bytes that all ranks of this process share with their peers. The
            overlaps of all names and modes use the same memory. It is 0 on CPUs if
            every group is in one process: ranks then read their peers' arrays in place,
            and slots are allocated for each call. On GPUs it is device memory, also in
            one process.
        transformer_engine_bytes: bytes that Transformer Engine would allocate for the
            same ranks: on each rank one buffer per name and mode, by default 12 T H
            elements per mode.
        on_gpus: whether the ranks are GPUs.
        shares_with: the first axis with the same groups of devices. Both axes use the
            same memory, which is counted there only. None if there is no such axis.
        reason: why a group of the axis has no buffers and runs as plain `jax.lax`; None
            if there is no such group.
    """

    axis_name: tuple[str, ...]
    tp_size: int
    shape: tuple[int, int]
    overlaps: tuple[Overlap, ...]
    num_ranks: int
    shared_bytes: int
    transformer_engine_bytes: int
    on_gpus: bool = False
    shares_with: tuple[str, ...] | None = None
    reason: str | None = None

    def __str__(self) -> str:
        """Returns the total size, and a table of the axis's named overlaps."""
        header = ("name", "mode", "method", "comm", "dtype", "shape", "size")
        rows = [
            (
                one.name,
                one.mode.name,
                one.method,
                one.comm_type.value,
                one.buffer_dtype,
                list(one.buffer_shape),
                format_bytes(one.size_bytes),
            )
            for one in self.overlaps
        ]
        lines = format_table(header, rows)
        return "\n".join([self._title(), *(f"  {line}" for line in lines)])

    def _title(self):
        ours = f"{format_bytes(self.shared_bytes)}, shared by all names"
        if self.shares_with is not None:
            ours += f", in addition to those of axis {self.shares_with}"
        elif self.shared_bytes == 0 and self.reason is not None:
            ours = f"none: {self.reason}"
        elif self.on_gpus:
            ours = f"heaps of {ours}" if self.shared_bytes else "none: not connected"
        elif self.shared_bytes == 0:
            ours = "none, since ranks of one process read each other's arrays"
        return (
            f"axis {self.axis_name}, {self.tp_size} ranks, {self.num_ranks} of them "
            f"in this process, [T, H] = {list(self.shape)}\n"
            f"  buffers: {ours}\n"
            "  in Transformer Engine, with one per name: "
            f"{format_bytes(self.transformer_engine_bytes)}"
        )


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory that this process holds for communication; it prints as a table.

    Transformer Engine: none.

    Attributes:
        axes: for each call of `initialize_ub`, an object with the `axis_name`,
            `tp_size`, `shape`, `overlaps` and `shared_bytes` of its buffers.
        slot_bytes: bytes of the slots of calls within this process on CPUs. All axes
            share them; `destroy_ub` frees them.
        heap_bytes: bytes of the GPU heaps of calls that `initialize_ub` made no heap
            for. They are kept as long as their programs may run again.
        gpus: how XLA and jax_ub divide the memory of this process's GPUs.
        held_bytes: the sum of `slot_bytes`, `heap_bytes` and all `shared_bytes`.
        transformer_engine_bytes: the bytes that Transformer Engine would allocate for
            the ranks of this process, with one buffer per name and mode.
    """

    axes: tuple[AxisMemory, ...]
    slot_bytes: int
    heap_bytes: int = 0
    gpus: tuple["GpuMemory", ...] = ()

    @property
    def held_bytes(self) -> int:
        """Returns the total size of this process's shared buffers, slots and heaps."""
        shared = sum(axis.shared_bytes for axis in self.axes)
        return self.slot_bytes + self.heap_bytes + shared

    @property
    def transformer_engine_bytes(self) -> int:
        """Returns how many bytes Transformer Engine would allocate for these axes."""
        return sum(axis.transformer_engine_bytes for axis in self.axes)

    def __str__(self) -> str:
        """Returns tables of buffers by mesh axis, then lines about slots and GPUs."""
        slots = f"slots of calls within this process: {format_bytes(self.slot_bytes)}"
        lines = [*map(str, self.axes), slots]
        if self.gpus:
            heaps = format_bytes(self.heap_bytes)
            lines += [f"heaps of calls without initialize_ub: {heaps}"]
        return "\n".join([*lines, *map(str, self.gpus)])


@dataclasses.dataclass(frozen=True)
class GpuMemory:
    """How XLA and communication buffers divide the memory of a GPU.

    Attributes:
        ordinal: the CUDA ordinal of the GPU in this process.
        name: the GPU's model name.
        total_bytes: the GPU's memory.
        xla_bytes: bytes that XLA preallocates before any program runs.
    """

    ordinal: int
    name: str
    total_bytes: int
    xla_bytes: int

    def __str__(self) -> str:
        """Returns one line that states how XLA and heaps divide the GPU's memory."""
        left = self.total_bytes - self.xla_bytes
        return (
            f"GPU {self.ordinal} ({self.name}): {format_bytes(self.total_bytes)}, of "
            f"which XLA preallocates {format_bytes(self.xla_bytes)} "
            "(XLA_CLIENT_MEM_FRACTION, XLA_PYTHON_CLIENT_PREALLOCATE); heaps use the "
            f"other {format_bytes(left)}"
        )


def memory_report() -> MemoryReport:
    """Returns the sizes of this process's communication buffers, by mesh axis.

    Transformer Engine: none.

    Returns:
        The bytes by axis and in total. Prints as a table.
    """
    owners: dict[Key, InitializedAxis] = {}
    for axis in registry.axes():
        for key in axis.device_groups.keys:
            owners.setdefault(key, axis)
    axes = tuple(_axis_memory(axis, owners) for axis in registry.axes())
    has_engine = cpu_engine.why_not() is None
    slot_bytes = cpu_engine.load().counters()["slot_bytes"] if has_engine else 0
    devices = cuda_engine.usable_devices()
    if not devices:
        return MemoryReport(axes, slot_bytes)
    connected = sum(axis.shared_bytes for axis in axes if axis.on_gpus)
    heap_bytes = max(0, cuda_engine.load().counters()["heap_bytes"] - connected)
    share = settings.xla_memory_share()
    gpus = tuple(
        GpuMemory(
            ordinal=one["ordinal"],
            name=one["name"],
            total_bytes=one["memory_bytes"],
            xla_bytes=int(share * one["memory_bytes"]),
        )
        for one in devices
    )
    return MemoryReport(axes, slot_bytes, heap_bytes, gpus)


def _axis_memory(
    axis: InitializedAxis, owners: Mapping[Key, InitializedAxis]
) -> AxisMemory:
    groups = axis.device_groups
    num_ranks = groups.num_local_ranks
    found = [one for one in communicators.connections() if one.key in groups.keys]
    made = {one.key: one.communicator for one in found if one.communicator}
    own = [one for key, one in made.items() if owners[key] is axis]
    others = [owners[key] for key in made if owners[key] is not axis]
    reasons = (one.reason for one in found if one.reason is not None)
    return AxisMemory(
        axis_name=axis.axis_name,
        tp_size=axis.tp_size,
        shape=axis.shape,
        overlaps=tuple(axis.overlaps.values()),
        num_ranks=num_ranks,
        shared_bytes=sum(one.size_bytes for one in own),
        transformer_engine_bytes=num_ranks * _transformer_engine_bytes(axis),
        on_gpus=groups.platform in ("cuda", "rocm"),
        shares_with=others[0].axis_name if others else None,
        reason=next(reasons, cpu_engine.why_not()),
    )


def _transformer_engine_bytes(axis: InitializedAxis) -> int:
    """Returns how many bytes Transformer Engine would allocate for a rank of the axis.

    Transformer Engine allocates a buffer for each of its twelve names, even for a wgrad
    that communicates nothing because the dgrad reduce-scatters dx.
    """
    num_unused = sum(
        (name, mode) not in axis.overlaps
        for name in ub_cfgs.NAMES
        for mode in axis.modes
    )
    spare = math.prod(axis.shape) * axis.dtype.itemsize
    return sum(one.size_bytes for one in axis.overlaps.values()) + num_unused * spare
