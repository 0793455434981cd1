"""Simulates the engine's schedules: computes when each rank starts and ends its steps.

The duration of a step is given by a cost model of the hardware.

A GPU rank has two lanes: its multiprocessors, and the stream that communicates, which
launches copies, waits and sums one after the other. GEMMs are launched on other
streams, and share the multiprocessors with sums and local copies. A host rank is one
thread, which runs one step after the other and blocks in waits.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src.prediction.cost import Processors, Workload
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.runtime import cpu_engine

ALL_CHUNKS = -1

# One step of a rank's schedule, from the C++ module `jax_ub._cpu`. `kind` is the
# action, such as "multiply", "put", "wait" or "reduce". `payload` is what it transfers:
# "operand", "partial" or "sum".
Step = Any


@functools.lru_cache(maxsize=1024)
def steps_of(op: str, method: str, *sizes: int, variant: str) -> tuple[Step, ...]:
    """Returns the steps of one rank in the engine's schedule of an op and method.

    `sizes` are the rank, the number of ranks and the number of splits.
    """
    return tuple(cpu_engine.load().schedule(op, method, *sizes, variant))


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of a simulated schedule: splits, chunks per GEMM kernel, and streams.

    They are varied to find the fastest schedule. A rank's rows have `num_splits`
    splits, a kernel multiplies `aggregate` chunks, and kernels are launched on
    `streams` streams in turn.
    """

    num_splits: int = 1
    aggregate: int = 1
    streams: int = 1


@dataclasses.dataclass(frozen=True)
class Span:
    """A simulated step of one rank, with its start and end in seconds.

    `lane` is "rank" on a host. On a GPU, a span is a launch, and its lane is "gemm", or
    "wire" for the stream that communicates.
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
    """Simulates the schedules of all ranks; returns the start and end of all steps.

    The steps of a single rank represent all ranks: data arrives from a peer when this
    rank sends the same data.
    """
    # When peers have filled a rank's receive slots, in seconds, keyed by (rank, slot).
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
    """Simulates the schedule of one rank, which waits for steps of its peers."""

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
        self._lane = "rank" if hardware.is_host else "wire"
        self._clock = 0.0  # the end of the lane's last step
        self._processors = None
        if not hardware.is_host:
            self._processors = Processors(hardware, options.streams, work.rate_itemsize)
        self._kernels = _kernels(rank, steps, work.gathers, options.aggregate)
        self._has_waited_for_free_slots = False
        # A one-shot all-reduce, which puts all chunks at once, sends, waits and sums in
        # one kernel.
        self._is_one_kernel = any(
            step.kind == "put" and step.chunk == ALL_CHUNKS for step in steps
        )
        # When received data arrived, keyed by (payload, chunk, split), with the sender
        # in place of the chunk for partial sums. The next three members have the times
        # at which products, sums and gathered rows were complete.
        self._received: dict[tuple[str, int, int], float] = {}
        self._multiplied: dict[tuple[int, int], float] = {}
        self._summed: dict[int, float] = {}
        self._gathered = 0.0

    def run(self) -> Iterator[bool]:
        """Simulates all steps, and yields True while a step must wait for a peer."""
        others = {
            "wait_free": self._wait_free,
            "put": self._put,
            "reduce": self._reduce,
            "copy": self._copy,
        }
        for index, step in enumerate(self._steps):
            if step.kind == "wait":
                while (self.rank, step.slot) not in self._arrivals:
                    yield True
                is_first = index == 0 or self._steps[index - 1].kind != "wait"
                self._wait(step, self._arrivals[self.rank, step.slot], is_first)
            elif step.kind == "multiply":
                self._multiply(step, self._kernels.get(index))
            elif step.kind in others:
                others[step.kind](step)
        if self._processors is not None and self._work.num_ranks > 1:
            self._run("end", (), end_s(self.spans), self._hardware.launch_s)

    def _run(self, kind, chunks, ready, duration):
        """Simulates a step after `ready` and the previous step; returns its end."""
        start = max(ready, self._clock)
        self._clock = start + duration
        self._add_span(self._lane, kind, chunks, start, self._clock)
        return self._clock

    def _add_span(self, lane, kind, chunks, start, end):
        self.spans.append(Span(self.rank, lane, kind, chunks, start, end))

    def _launch_wait(self, step):
        if not self._is_one_kernel:
            self._run("wait", (step.chunk,), 0.0, self._hardware.launch_s)

    def _wait_free(self, step):
        # The simulated call is the first of its communicator, so all receive slots are
        # free. On a GPU, one launch waits for all of them.
        if self._processors is not None and not self._has_waited_for_free_slots:
            self._launch_wait(step)
            self._has_waited_for_free_slots = True

    def _wait(self, step, time, is_first):
        if self._processors is None:
            if time > self._clock:
                self._run("wait", (step.chunk,), 0.0, time - self._clock)
        elif is_first:  # one kernel waits for all data of consecutive waits
            self._launch_wait(step)
        self._clock = time = max(self._clock, time)
        sender = step.peer if step.payload == "partial" else step.chunk
        self._received[step.payload, sender, step.split] = time
        self._gathered = max(self._gathered, time)

    def _put(self, step):
        hardware = self._hardware
        if step.payload == "partial":
            ready = self._multiplied.get((step.chunk, step.split), 0.0)
        elif step.payload == "sum" and step.chunk == self.rank:
            ready = self._summed[step.split]
        elif step.chunk == self.rank:
            ready = 0.0
        else:
            ready = self._received[step.payload, step.chunk, step.split]
        num_bytes = self._work.wire_bytes(step.payload, self._rows_of(step))
        seconds = num_bytes / hardware.copy_bytes_per_s
        if self._processors is not None and not self._is_one_kernel:
            seconds += hardware.launch_s
        end = self._run("put", (step.chunk,), ready, seconds)
        arrival = end + hardware.handshake_s
        self._arrivals[step.peer % self._num_simulated, step.slot] = arrival

    def _rows_of(self, step):
        return self._work.M if step.chunk == ALL_CHUNKS else self._rows

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
            gemm_s = gemm.flops / self._hardware.flops_of(self._work.rate_itemsize)
            end = self._run("multiply", chunks, ready, self._hardware.launch_s + gemm_s)
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
        ready = max([self._multiplied.get((self.rank, step.split), 0.0), *parts])
        chunks = (step.chunk,)
        if self._processors is None:
            self._run("reduce", chunks, ready, duration + self._hardware.launch_s)
        else:
            begun = max(ready, self._clock)
            start, self._clock = self._processors.run_on_all(begun, duration)
            self._add_span("wire", "reduce", chunks, start, self._clock)
        self._summed[step.split] = self._clock

    def _copy(self, step):
        num_bytes = 2 * self._work.wire_bytes(step.payload, self._rows)
        duration = num_bytes / self._hardware.memory_bytes_per_s
        if self._processors is None:
            end = self._run("copy", (step.chunk,), 0.0, duration)
        else:
            # The rank's own chunk is not received. It is an operand, ready at time 0.
            ready = self._received.get((step.payload, step.chunk, step.split), 0.0)
            start, end = self._processors.run_on_all(ready, duration)
            self._add_span("gemm", "copy", (step.chunk,), start, end)
        self._gathered = max(self._gathered, end)


def _kernels(
    own: int, steps: Sequence[Step], gathers: bool, aggregate: int
) -> dict[int, list[tuple[int, int]]]:
    """Groups multiply steps into GEMM kernels: {step index: [(chunk, split), ...]}.

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
