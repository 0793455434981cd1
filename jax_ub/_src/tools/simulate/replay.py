"""Simulates the engine's schedules: computes when each rank starts and ends its steps.

The duration of a step is given by a cost model of the hardware.

A GPU rank has several lanes: its multiprocessors, a copy engine, and a kernel that
sums. A step starts as soon as its inputs are available and its lane is free. A wait
only delays the steps that need the data. A host rank is one thread, which runs one step
after the other and blocks in waits.

For AG+GEMM in a ring and GEMM+RS, the replay equals a closed form, where c is the wire
time of a chunk, g the time of its GEMM, t0 the start of the first put and R the time of
the sum:

    AG  T = max(P g, t0 + c + (P - 1) g, t0 + (P - 1) c + g)
    RS  T = max(P g, (P - 1) g + c, g + (P - 1) c) + handshake + R
"""

import dataclasses
from collections.abc import Sequence

from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.kernels import kernels_of
from jax_ub._src.tools.simulate.schedules import ALL_CHUNKS, Step
from jax_ub._src.tools.simulate.tiles import Gemm, Processors
from jax_ub._src.tools.simulate.timeline import Span, Timeline
from jax_ub._src.tools.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of a schedule that the simulator varies to find the fastest plan.

    Attributes:
        num_splits: number of splits of a rank's rows, as in the schedule.
        aggregate: number of chunks that one kernel multiplies.
        streams: number of streams; kernels are launched on them in turn.
    """

    num_splits: int = 1
    aggregate: int = 1
    streams: int = 1


def replay(
    schedules: Sequence[Sequence[Step]],
    workload: Workload,
    hardware: Hardware,
    knobs: PlanOptions,
) -> Timeline:
    """Simulates schedules step by step; returns start and end times of all steps.

    Args:
        schedules: the steps of every rank. The steps of a single rank represent all
            ranks: data arrives from a peer when this rank sends the same data.
        workload: the op and its sizes.
        hardware: the machine.
        knobs: the plan's options; the schedules must have the same `num_splits`.

    Raises:
        ArithmeticError: if the schedules deadlock. The engine's schedules are proven
            not to.
    """
    flags = _Flags(mirrored=len(schedules) == 1)
    part = hardware.shared_by(workload.num_ranks)
    ranks = [
        _Rank(rank, steps, workload, part, knobs, flags)
        for rank, steps in enumerate(schedules)
    ]
    while any(rank.pending for rank in ranks):
        if not any([rank.advance() for rank in ranks]):
            raise ArithmeticError("simulate: the ranks of a schedule wait for ever")
    return Timeline(tuple(span for rank in ranks for span in rank.spans))


class _Flags:
    """Simulated times at which slots of communication memory are filled and released.

    The key is (kind, owner, slot). If one rank represents all ranks (`mirrored`), the
    owner is always rank 0.
    """

    def __init__(self, *, mirrored: bool):
        self._mirrored = mirrored
        self._times: dict[tuple[str, int, int], float] = {}

    def raise_at(self, kind: str, owner: int, slot: int, time: float) -> None:
        self._times[kind, 0 if self._mirrored else owner, slot] = time

    def time(self, kind: str, owner: int, slot: int) -> float | None:
        return self._times.get((kind, 0 if self._mirrored else owner, slot))


class _Rank:
    """The simulated state of one rank: its next step, its clock and its busy lanes.

    A lane is a resource that runs one step at a time, such as a copy engine.
    """

    def __init__(
        self,
        rank: int,
        steps: Sequence[Step],
        workload: Workload,
        hardware: Hardware,
        knobs: PlanOptions,
        flags: _Flags,
    ):
        self.rank = rank
        self.spans: list[Span] = []
        self._steps = list(steps)
        self._next = 0
        self._workload = workload
        self._hardware = hardware
        self._rows = workload.piece_rows(knobs.num_splits)
        self._flags = flags
        self._clock = 0.0  # seconds; used on hosts only
        self._processors = (
            None
            if hardware.is_host
            else Processors(hardware, knobs.streams, workload.itemsize)
        )
        self._kernels = kernels_of(rank, self._steps, workload, knobs.aggregate)
        self._lanes = {"wire": 0.0, "sum": 0.0}
        self._published: set[int] = set()  # slots of operands read in place
        # Times at which received data arrived, by (payload, chunk or sender, split).
        # The three members below have the times at which products, sums and gathered
        # rows were complete.
        self._here: dict[tuple[str, int, int], float] = {}
        self._multiplied: dict[tuple[int, int], float] = {}
        self._summed: dict[int, float] = {}
        self._gathered = 0.0

    @property
    def pending(self) -> bool:
        return self._next < len(self._steps)

    def advance(self) -> bool:
        """Simulates steps until one must wait for a peer; returns whether any ran."""
        before = self._next
        while self.pending and self._take(self._next, self._steps[self._next]):
            self._next += 1
        return self._next > before

    def _take(self, index, step):
        if step.kind == "wait":
            return self._wait(step)
        if step.kind == "wait_free":
            return self._wait_free(step)
        if step.kind == "multiply":
            self._multiply(index)
        else:
            _STEPS[step.kind](self, step)
        return True

    def _wait_free(self, step):
        # The simulated call is the first of its communicator, so all slots are free.
        # Only operands that peers read in place must be released by the peer first.
        if step.slot not in self._published:
            return True
        released = self._flags.time("released", step.peer, step.slot)
        if released is None:
            return False
        self._block(step, released)
        return True

    def _publish(self, step):
        self._published.add(step.slot)
        time = self._clock + self._hardware.handshake_s
        self._flags.raise_at("arrived", step.peer, step.slot, time)

    def _release(self, step):
        time = max(self._clock, *self._multiplied.values(), 0.0)
        self._flags.raise_at("released", self.rank, step.slot, time)

    def _wait(self, step):
        time = self._flags.time("arrived", self.rank, step.slot)
        if time is None:
            return False
        whose = step.peer if step.payload == "partial" else step.chunk
        self._here[step.payload, whose, step.split] = time
        self._gathered = max(self._gathered, time)
        self._block(step, time)
        return True

    def _block(self, step, until):
        if self._hardware.is_host and until > self._clock:
            self._span("rank", step, (step.chunk,), self._clock, until)
            self._clock = until

    def _put(self, step):
        if step.payload == "partial":
            ready = self._multiplied.get((step.chunk, step.split), 0.0)
        elif step.payload == "sum" and step.chunk == self.rank:
            ready = self._summed[step.split] + self._hardware.handshake_s
        elif step.chunk == self.rank:
            ready = self._first_put_s()
        else:
            ready = self._here[step.payload, step.chunk, step.split]
        num_bytes = self._workload.wire_bytes(step.payload, self._rows_of(step))
        duration = num_bytes / self._hardware.copy_bytes_per_s
        _, end = self._on_lane("wire", step, ready, duration)
        arrival = end
        if step.payload == "partial" or self._hardware.is_host:
            arrival += self._hardware.handshake_s
        self._flags.raise_at("arrived", step.peer, step.slot, arrival)

    def _rows_of(self, step):
        return self._workload.M if step.chunk == ALL_CHUNKS else self._rows

    def _first_put_s(self):
        # A GPU first copies its shard into memory that peers can read, and signals
        # that the data is ready. A host's operands are readable from the start.
        if self._hardware.is_host:
            return 0.0
        shard = self._workload.wire_bytes(
            "operand", self._workload.M // self._workload.num_ranks
        )
        staged = 2 * shard / self._hardware.memory_bytes_per_s
        return staged + self._hardware.handshake_s

    def _multiply(self, index):
        kernel = self._kernels[index]
        if kernel is None:
            return
        step = self._steps[index]
        everything = step.chunk == ALL_CHUNKS
        whole = self._workload.gemm
        if everything:
            gemm, needed = whole, [self._gathered]
        else:
            gemm = self._workload.gemm_of(len(kernel) * self._rows)
            needed = [
                self._here.get(("operand", part.chunk, part.split), 0.0)
                for part in kernel
                if part.payload == "operand"
            ]
        at_least = 0.0
        if self._published and not self._hardware.is_host:
            # Operands are read in place, so the GEMM includes the wire time.
            at_least = self._workload.moved_bytes / self._hardware.copy_bytes_per_s
        end = self._run(step, kernel, gemm, max(needed, default=0.0), at_least)
        for part in kernel:
            self._multiplied[part.chunk, part.split] = end
        if everything:
            for chunk in (ALL_CHUNKS, *range(self._workload.num_ranks)):
                for split in range(self._num_splits()):
                    self._multiplied[chunk, split] = end

    def _num_splits(self):
        return 1 + max(step.split for step in self._steps)

    def _run(self, step, kernel, gemm: Gemm, ready, at_least):
        chunks = tuple(part.chunk for part in kernel)
        if self._processors is None:
            start = max(self._clock, ready)
            rate = self._hardware.flops_of(self._workload.itemsize)
            end = start + self._hardware.launch_s + gemm.flops / rate
            self._clock = end
            self._span("rank", step, chunks, start, end)
        else:
            start, end = self._processors.run(ready, gemm)
            end = max(end, start + at_least)
            self._span("gemm", step, chunks, start, end)
        return end

    def _reduce(self, step):
        num_bytes = self._workload.reduce_bytes(self._rows_of(step))
        duration = (
            num_bytes / self._hardware.memory_bytes_per_s + self._hardware.launch_s
        )
        parts = [
            time
            for (payload, _, split), time in self._here.items()
            if payload == "partial" and split == step.split
        ]
        own = self._multiplied.get((self.rank, step.split), 0.0)
        _, end = self._on_lane("sum", step, max([own, *parts]), duration)
        self._summed[step.split] = end

    def _copy(self, step):
        # On a GPU, copy engines write into the result. A host copies out of the slot.
        if self._hardware.is_host:
            num_bytes = 2 * self._workload.wire_bytes(step.payload, self._rows)
            duration = num_bytes / self._hardware.memory_bytes_per_s
            self._on_lane("rank", step, 0.0, duration)
        self._gathered = max(self._gathered, self._clock)

    def _on_lane(self, lane, step, ready, duration):
        if self._hardware.is_host:
            start = max(self._clock, ready)
            self._clock = start + duration
            lane = "rank"
        else:
            start = max(self._lanes[lane], ready)
            self._lanes[lane] = start + duration
        self._span(lane, step, (step.chunk,), start, start + duration)
        return start, start + duration

    def _span(self, lane, step, chunks, start, end):
        self.spans.append(
            Span(self.rank, lane, step.kind, chunks, step.split, step.peer, start, end)
        )


_STEPS = {
    "put": _Rank._put,
    "publish": _Rank._publish,
    "reduce": _Rank._reduce,
    "copy": _Rank._copy,
    "release": _Rank._release,
}
