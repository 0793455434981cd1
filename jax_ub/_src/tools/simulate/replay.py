"""Simulates the engine's schedules: computes when each rank starts and ends its steps.

The duration of a step is given by a cost model of the hardware.

A GPU rank has several lanes: its multiprocessors, a copy engine, and a kernel that
sums. A step starts as soon as its inputs are available and its lane is free. A wait
only delays the steps that need the data. A host rank is one thread, which runs one step
after the other and blocks in waits.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.simulate.cost import Processors, Workload
from jax_ub._src.tools.simulate.hardware import Hardware

ALL_CHUNKS = -1


# A step that `jax_ub._cpu` returns. `kind` is the action, such as "multiply", "put",
# "wait" or "reduce". `payload` is what it transfers: "operand", "partial" or "sum".
Step = Any


@functools.lru_cache(maxsize=1024)
def steps_of(op: str, method: str, *sizes: int, variant: str) -> tuple[Step, ...]:
    """Returns the steps of one rank in the engine's schedule of an op and method.

    `sizes` are the rank, the number of ranks and the number of splits.
    """
    return tuple(cpu_engine.load().schedule(op, method, *sizes, variant))


def sums_at_once(steps: Sequence[Step]) -> list[Step]:
    """Reorders a schedule so that each sum is sent as soon as it is computed.

    The engine's schedule sends all sums at the end. With a copy engine, the sums of one
    block are sent while the next block is multiplied.
    """
    sums = [step for step in steps if step.kind == "put" and step.payload == "sum"]
    own = [step for step in sums if step.chunk == sums[0].chunk]
    moved: list[Step] = []
    for step in steps:
        if any(step is one for one in own):
            continue
        moved.append(step)
        if step.kind == "reduce":
            moved += [one for one in own if one.split == step.split]
    return moved


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of a simulated schedule, which are varied to find the fastest one.

    A rank's rows have `num_splits` splits, a kernel multiplies `aggregate` chunks, and
    kernels are launched on `streams` streams in turn.
    """

    num_splits: int = 1
    aggregate: int = 1
    streams: int = 1


@dataclasses.dataclass(frozen=True)
class Span:
    """A simulated step of one rank, with its start and end in seconds.

    `lane` is the resource that runs it: "gemm", "wire" or "sum" on a GPU, "rank" on a
    host, where waits are spans, too.
    """

    rank: int
    lane: str
    kind: str
    chunks: tuple[int, ...]
    start_s: float
    end_s: float


def replay(
    schedules: Sequence[Sequence[Step]],
    work: Workload,
    hardware: Hardware,
    options: PlanOptions,
) -> list[Span]:
    """Simulates the schedules of all ranks and returns the spans of all steps.

    The steps of a single rank represent all ranks: data arrives from a peer when this
    rank sends the same data.
    """
    # The times at which slots of communication memory are filled, keyed by (rank,
    # slot).
    arrivals: dict[tuple[int, int], float] = {}
    part = hardware.shared_by(work.num_ranks)
    ranks = [
        _Rank(rank, steps, work, part, options, arrivals, len(schedules))
        for rank, steps in enumerate(schedules)
    ]
    running = [rank.run() for rank in ranks]
    while running:
        before = len(arrivals), len(running)
        running = [run for run in running if next(run, False)]
        if (len(arrivals), len(running)) == before:
            raise ArithmeticError("simulate: the ranks of a schedule wait for ever")
    return [span for rank in ranks for span in rank.spans]


def end_s(spans: Sequence[Span]) -> float:
    """Returns the time at which the last rank finishes, the duration of the call."""
    return max((span.end_s for span in spans), default=0.0)


class _Rank:
    """The simulated state of one rank: its next step, clock and busy resources.

    A lane is a resource that runs one step at a time, such as a copy engine.
    """

    def __init__(
        self,
        rank: int,
        steps: Sequence[Step],
        work: Workload,
        hardware: Hardware,
        options: PlanOptions,
        arrivals: dict[tuple[int, int], float],
        num_simulated: int,
    ):
        self.rank = rank
        self.spans: list[Span] = []
        self._steps = steps
        self._work, self._hardware = work, hardware
        self._rows = work.split_rows(options.num_splits)
        self._num_splits = options.num_splits
        self._arrivals, self._num_simulated = arrivals, num_simulated
        self._clock = 0.0  # seconds; used on hosts only
        self._processors = None
        if not hardware.is_host:
            self._processors = Processors(hardware, options.streams, work.itemsize)
        self._kernels = _kernels(rank, steps, work.gathers, options.aggregate)
        self._lanes = {"wire": 0.0, "sum": 0.0}
        # The times at which received data arrived, keyed by (payload, chunk or sender,
        # split). The three members below have the times at which products, sums and
        # gathered rows were complete.
        self._received: dict[tuple[str, int, int], float] = {}
        self._multiplied: dict[tuple[int, int], float] = {}
        self._summed: dict[int, float] = {}
        self._gathered = 0.0

    def run(self) -> Iterator[bool]:
        """Simulates all steps, and yields True while a step must wait for a peer."""
        for index, step in enumerate(self._steps):
            if step.kind == "wait":
                while (self.rank, step.slot) not in self._arrivals:
                    yield True
                self._wait(step, self._arrivals[self.rank, step.slot])
            elif step.kind == "multiply":
                self._multiply(step, self._kernels.get(index))
            elif step.kind == "put":
                self._put(step)
            elif step.kind == "reduce":
                self._reduce(step)
            elif step.kind == "copy":
                self._copy(step)
            # The simulated call is the first of its communicator: all slots are free.

    def _wait(self, step, time):
        sender = step.peer if step.payload == "partial" else step.chunk
        self._received[step.payload, sender, step.split] = time
        self._gathered = max(self._gathered, time)
        if self._hardware.is_host and time > self._clock:
            self._add_span("rank", "wait", (step.chunk,), self._clock, time)
            self._clock = time

    def _put(self, step):
        hardware = self._hardware
        if step.payload == "partial":
            ready = self._multiplied.get((step.chunk, step.split), 0.0)
        elif step.payload == "sum" and step.chunk == self.rank:
            ready = self._summed[step.split] + hardware.handshake_s
        elif step.chunk == self.rank:
            ready = self._first_put_s()
        else:
            ready = self._received[step.payload, step.chunk, step.split]
        num_bytes = self._work.wire_bytes(step.payload, self._rows_of(step))
        end = self._run("wire", step, ready, num_bytes / hardware.copy_bytes_per_s)
        if step.payload == "partial" or hardware.is_host:
            end += hardware.handshake_s
        self._arrivals[step.peer % self._num_simulated, step.slot] = end

    def _rows_of(self, step):
        return self._work.M if step.chunk == ALL_CHUNKS else self._rows

    def _first_put_s(self):
        # A GPU first copies its shard into memory that peers can read, and signals
        # that the data is ready. A host's operands are readable from the start.
        if self._hardware.is_host:
            return 0.0
        shard = self._work.wire_bytes("operand", self._work.split_rows(1))
        staged_s = 2 * shard / self._hardware.memory_bytes_per_s
        return staged_s + self._hardware.handshake_s

    def _multiply(self, step, kernel):
        if kernel is None:
            return
        if step.chunk == ALL_CHUNKS:
            gemm, ready = self._work.gemm, self._gathered
        else:
            gemm = self._work.gemm_of(len(kernel) * self._rows)
            times = [self._received.get(("operand", *key), 0.0) for key in kernel]
            ready = max(times) if step.payload == "operand" else 0.0
        chunks = tuple(chunk for chunk, _ in kernel)
        if self._processors is None:
            gemm_s = gemm.flops / self._hardware.flops_of(self._work.itemsize)
            end = self._run("", step, ready, self._hardware.launch_s + gemm_s, chunks)
        else:
            start, end = self._processors.run(ready, gemm)
            self._add_span("gemm", "multiply", chunks, start, end)
        if step.chunk == ALL_CHUNKS:
            every = (ALL_CHUNKS, *range(self._work.num_ranks))
            kernel = [(c, s) for c in every for s in range(self._num_splits)]
        self._multiplied.update(dict.fromkeys(kernel, end))

    def _reduce(self, step):
        num_bytes = self._work.reduce_bytes(self._rows_of(step))
        duration = num_bytes / self._hardware.memory_bytes_per_s
        parts = [
            time
            for (payload, _, split), time in self._received.items()
            if payload == "partial" and split == step.split
        ]
        own = self._multiplied.get((self.rank, step.split), 0.0)
        ready = max([own, *parts])
        end = self._run("sum", step, ready, duration + self._hardware.launch_s)
        self._summed[step.split] = end

    def _copy(self, step):
        # On a GPU, copy engines write into the result. A host copies out of the slot.
        if self._hardware.is_host:
            num_bytes = 2 * self._work.wire_bytes(step.payload, self._rows)
            self._run("rank", step, 0.0, num_bytes / self._hardware.memory_bytes_per_s)
        self._gathered = max(self._gathered, self._clock)

    def _run(self, lane, step, ready, duration, chunks=()):
        """Runs a step on a lane, or on a host's only thread; returns its end time."""
        start = max(ready, self._clock if self._hardware.is_host else self._lanes[lane])
        end = start + duration
        if self._hardware.is_host:
            lane, self._clock = "rank", end
        else:
            self._lanes[lane] = end
        self._add_span(lane, step.kind, chunks or (step.chunk,), start, end)
        return end

    def _add_span(self, lane, kind, chunks, start, end):
        self.spans.append(Span(self.rank, lane, kind, chunks, start, end))


def _kernels(
    own: int, steps: Sequence[Step], gathers: bool, aggregate: int
) -> dict[int, list[tuple[int, int]]]:
    """Returns the (chunk, split) pairs of each GEMM kernel, by the step that runs it.

    Up to `aggregate` consecutive chunks of peers are multiplied by one kernel; the
    rank's own chunk has a separate kernel. If operands are gathered, the kernel is
    launched at the last of its chunks, when all have arrived. If partial sums are sent,
    it is launched at the first chunk, and the sums are sent when it has finished.
    """
    alone = (own, ALL_CHUNKS)
    groups: list[list[int]] = []
    for index, step in enumerate(steps):
        if step.kind != "multiply":
            continue
        first = steps[groups[-1][0]] if groups else step
        is_apart = step.chunk in alone or first.chunk in alone
        is_full = not groups or len(groups[-1]) == aggregate
        if not is_apart and not is_full and step.split == first.split:
            groups[-1].append(index)
        else:
            groups.append([index])
    return {
        group[-1 if gathers else 0]: [
            (chunk, step.split)
            for step in map(steps.__getitem__, group)
            for chunk in range(step.chunk, step.chunk + step.num_chunks)
        ]
        for group in groups
    }
