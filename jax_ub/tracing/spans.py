"""A trace: calls, and spans of time in which ranks and threads did something."""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

Key = TypeVar("Key")

# The engine's kinds, apart from the steps of schedules.
CALL = "call"  # a rank's call, from its arrival to its completion
GATHER = "gather"  # until the other ranks' calls have arrived
BARRIER = "barrier"  # until the other processes are there
UNIT = "unit"  # a part of a GEMM, on one thread
WAITS = (GATHER, BARRIER, "wait", "wait_free")
AROUND = (CALL, GATHER, BARRIER, UNIT)


@dataclasses.dataclass(frozen=True)
class Call:
    """One execution of a call by the ranks of a group.

    Attributes:
        label: the public function and the user's name for it.
        op: the FFI target without "jax_ub$".
        method: how it ran.
        num_ranks: P.
        num_splits: pieces of a shard that were asked for; 0 left it to the engine.
        devices: ids by rank; one where nothing is communicated.
        operands: of one rank, as in "bf16[128, 512] bf16[512, 256]".
        variant: of the method's schedule, where that has it.
    """

    label: str
    op: str
    method: str
    num_ranks: int
    num_splits: int
    devices: tuple[int, ...]
    operands: str
    variant: str = "plain"


@dataclasses.dataclass(frozen=True)
class Span:
    """What was done from `begin_ns` to `end_ns` of the host's monotonic clock.

    Attributes:
        begin_ns: begin.
        end_ns: end.
        process: in which process of the job.
        thread: on which of its threads.
        call: index into `Trace.calls`.
        kind: a step of a schedule, or one of `AROUND`.
        rank: in the group; -1 for all of them.
        chunk: whose rows, the first of several; -1 for everything.
        split: which piece of the chunk.
        peer: the other rank, or -1.
        payload: "operand", "partial" or "sum".
    """

    begin_ns: int
    end_ns: int
    process: int
    thread: int
    call: int
    kind: str
    rank: int
    chunk: int
    split: int
    peer: int
    payload: str

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.begin_ns) * 1e-9


@dataclasses.dataclass(frozen=True)
class Trace:
    """What several processes of one host did, on one clock.

    Attributes:
        calls: in the order in which they began.
        spans: in no order.
        num_dropped: spans and calls for which there was no room.
    """

    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    num_dropped: int = 0

    def of_call(self, index: int) -> list[Span]:
        """The spans of one call, by time."""
        return sorted(
            (span for span in self.spans if span.call == index),
            key=lambda span: (span.begin_ns, -span.end_ns),
        )

    def seconds_of(self, index: int) -> float:
        """From the first rank's arrival to the last one's completion."""
        spans = self.of_call(index)
        if not spans:
            return 0.0
        return (max(s.end_ns for s in spans) - spans[0].begin_ns) * 1e-9

    def exposed_s(self) -> dict[str, float]:
        """Seconds that a rank waited in a call, on average, by the call's label."""
        return self._exposed_s(lambda call: call.label)

    def exposed_by_op_s(self) -> dict[tuple[str, str], float]:
        """The same by label and op: a label is that of the backward's calls too."""
        return self._exposed_s(lambda call: (call.label, call.op))

    def _exposed_s(self, key: Callable[[Call], Key]) -> dict[Key, float]:
        """The mean over ranks and calls.

        Waiting for other ranks' calls, for chunks, for free slots and for other
        processes; what was hidden behind a product does not show.
        """
        ranks: dict[tuple[int, int], set[int]] = {}
        for span in self.spans:
            if span.rank >= 0:
                ranks.setdefault((span.call, span.process), set()).add(span.rank)
        waited: collections.Counter[int] = collections.Counter()
        for span in self.spans:
            if span.kind in WAITS:
                # A barrier is waited for by all ranks of its process.
                here = ranks.get((span.call, span.process), ())
                count = len(here) if span.rank < 0 else 1
                waited[span.call] += count * (span.end_ns - span.begin_ns)
        found: dict[Key, list[float]] = {}
        for index, call in enumerate(self.calls):
            each = waited[index] * 1e-9 / call.num_ranks
            found.setdefault(key(call), []).append(each)
        return {which: statistics.fmean(times) for which, times in found.items()}


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of several: the n-th call of a label and a group is one call."""
    calls: list[Call] = []
    spans: list[Span] = []
    found: dict[tuple[Call, int], int] = {}
    for trace in traces:
        seen: collections.Counter[Call] = collections.Counter()
        indices = []
        for call in trace.calls:
            key = (call, seen[call])
            seen[call] += 1
            if key not in found:
                found[key] = len(calls)
                calls.append(call)
            indices.append(found[key])
        spans += [dataclasses.replace(s, call=indices[s.call]) for s in trace.spans]
    return Trace(tuple(calls), tuple(spans), sum(t.num_dropped for t in traces))
