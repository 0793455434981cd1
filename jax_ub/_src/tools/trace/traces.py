"""Traces: their recording, the calls and time spans in them, and their files.

The CPU engine records the spans of ranks and threads. A file has the JSON format of
Perfetto (ui.perfetto.dev) and Chrome. Every process is a process in the file. Every
rank and every thread of the engine is a track. An arrow connects each wait with the put
that it waits for.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_ub._src.errors import (
    InputError,
    ShapeContractError,
    TraceError,
    UnknownNameError,
    shown,
)
from jax_ub._src.output import checked_output, write_json
from jax_ub._src.runtime import backend, cpu_engine
from jax_ub._src.scalars import is_integer
from jax_ub._src.tools.launch.parts import part_path

_EVENTS_PER_THREAD = 1 << 16
_MAX_EVENTS_PER_THREAD = 1 << 24
# Kinds of spans in a trace that are not steps of a communication schedule.
CALL = "call"  # a rank's call, from its start to its completion
GATHER = "gather"  # waits until the calls of the other ranks have arrived
BARRIER = "barrier"  # waits until the other processes have arrived
UNIT = "unit"  # a work unit of a GEMM on one thread
WAITS = (GATHER, BARRIER, "wait", "wait_free")
AROUND = (CALL, GATHER, BARRIER, UNIT)
_CATEGORY = "jax_ub"
_FIX = "Give the files of ub.trace or `python -m jax_ub trace --json`."
# First track id of threads in a trace file: thread n of a process has the track id
# `_FIRST_THREAD + n`. Smaller track ids are device ids.
_FIRST_THREAD = 100_000
# Maps the kind of a span to the preposition before the peer in the span's title. For
# example, the title "put 3 to 1" means that chunk 3 is sent to rank 1.
_PREPOSITIONS = {"put": "to", "wait": "from", "wait_free": "free at", "publish": "to"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One execution of a jax_ub call, such as an AG+GEMM, by all ranks of a group.

    Attributes:
        label: names the public function and the user's name for the call.
        op: name of the FFI target without "jax_ub$".
        method: method that ran.
        num_ranks: tensor-parallel size P.
        num_splits: requested number of splits of a chunk; 0 lets the engine choose.
        devices: device ids by rank; a single id if the call does not communicate.
        operands: operands of one rank, such as "bf16[128, 512] bf16[512, 256]".
        variant: variant of the method's schedule.
    """

    label: str
    op: str
    method: str
    num_ranks: int
    num_splits: int
    devices: tuple[int, ...]
    operands: str
    variant: str = "plain"

    @property
    def where(self) -> str:
        """Returns the name that the user gave the call, or its label if it has none."""
        return ub_name_in(self.label) or self.label

    @property
    def title(self) -> str:
        """Returns the op and the name of the call, such as "wgrad (up)"."""
        return self.op if self.where == self.op else f"{self.op} ({self.where})"


def ub_name_in(label: str) -> str:
    """Returns the `ub_name` or layer path at the end of a call's label, or ""."""
    found = re.search(r"\((?:ub_name|layer) (.*)\)$", label)
    if not found:
        return ""
    try:
        return str(ast.literal_eval(found[1]))
    except (SyntaxError, ValueError):  # the label has a truncated name
        return found[1]


@dataclasses.dataclass(frozen=True)
class Span:
    """A timed activity of one rank or thread in a call, such as a GEMM or a wait.

    Times are from the host's monotonic clock.

    Attributes:
        begin_ns: start time.
        end_ns: end time.
        process: process index in the job.
        thread: thread index in the process.
        call: index into `Trace.calls`.
        kind: kind of the schedule's step, or one of `AROUND`.
        rank: rank in the group; -1 if the activity is for all ranks of the process.
        chunk: index of the chunk, or of the first of several; -1 for all rows.
        split: index of the split within the chunk.
        peer: the other rank, or -1.
        payload: what is communicated: "operand", "partial" or "sum".
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
        return (self.end_ns - self.begin_ns) * 1e-9


@dataclasses.dataclass(frozen=True)
class Trace:
    """A recording of jax_ub calls, in one or several processes of a host.

    Attributes:
        calls: the calls, ordered by their start.
        spans: the spans, in no particular order, on one clock.
        num_dropped: number of spans and calls that did not fit into the buffers.
    """

    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    num_dropped: int = 0

    def of_call(self, index: int) -> list[Span]:
        """Returns the spans of `calls[index]`, sorted by their start."""
        return list(self._spans_by_call.get(index, ()))

    @functools.cached_property
    def _spans_by_call(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {}
        for span in sorted(self.spans, key=lambda one: (one.begin_ns, -one.end_ns)):
            found.setdefault(span.call, []).append(span)
        return found

    def seconds_of(self, index: int) -> float:
        """Returns the seconds from a call's first start to its last end on any rank."""
        spans = self.of_call(index)
        if not spans:
            return 0.0
        return (max(s.end_ns for s in spans) - spans[0].begin_ns) * 1e-9

    def waiting_s(self) -> list[float]:
        """Returns, for each call, the average number of seconds that a rank waits.

        Includes waits for other ranks' calls, chunks, free slots and other processes.
        Communication that is hidden behind a GEMM causes no waits. The average is over
        the recorded ranks: the trace of one process lacks those of other processes.
        """
        ranks: dict[tuple[int, int], set[int]] = {}
        for span in self.spans:
            if span.rank >= 0:
                ranks.setdefault((span.call, span.process), set()).add(span.rank)
        waits, num_ranks = [0.0] * len(self.calls), [0] * len(self.calls)
        for (call, _), recorded in ranks.items():
            num_ranks[call] += len(recorded)
        for span in self.spans:
            if span.kind in WAITS:
                # A span with rank -1 is a wait of a whole process. It counts once for
                # each recorded rank of the process.
                local = ranks.get((span.call, span.process), ())
                waits[span.call] += span.seconds * (len(local) if span.rank < 0 else 1)
        return [s / max(num, 1) for s, num in zip(waits, num_ranks, strict=True)]

    def exposed_by_op_s(self) -> dict[tuple[str, str], float]:
        """Returns {(label, op): seconds that a rank waits in a typical call}.

        The calls of a backward pass have the same label.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for call, seconds in zip(self.calls, self.waiting_s(), strict=True):
            found.setdefault((call.label, call.op), []).append(seconds)
        return {key: typical_seconds(times) for key, times in found.items()}


def typical_seconds(seconds: Iterable[float]) -> float:
    """Returns the median time of repeated calls, without the first one.

    In the first call, ranks also wait for others to compile the program. `seconds` has
    the times in the order of the calls. If there is only one call, returns its time.
    """
    first, *others = seconds
    return statistics.median_high(others or [first])


class Recording:
    """The object that `ub.trace` yields; its `trace` is set when the block ends."""

    def __init__(self):
        self.trace: Trace | None = None


_running: list[Recording] = []


@contextlib.contextmanager
def trace(
    path: str | pathlib.Path | None = None,
    *,
    events_per_thread: int = _EVENTS_PER_THREAD,
) -> Iterator[Recording]:
    """Records when each rank computes, sends and waits in the jax_ub calls of a block.

        with ub.trace("step.json"):
            jax.block_until_ready(step(state))

    Open the file at https://ui.perfetto.dev. Wait for the results inside the block,
    because JAX dispatches asynchronously. In a multi-process job, each process writes
    its own file, "step.0.json" and so on; `python -m jax_ub trace --merge step.*.json
    --json step.json` merges them.

    Only calls of the CPU engine are recorded. On GPUs, use `jax.profiler.trace`, which
    shows the kernels and copies of jax_ub.

    Transformer Engine: none.

    Args:
        path: the file to write; None keeps the trace only in `.trace` of the yielded
            object.
        events_per_thread: capacity of each thread's buffer, with 32 bytes per span.
            Further spans are dropped and counted.

    Yields:
        A `Recording`. After the block, its `.trace` has all spans, with times in ns.

    Raises:
        TraceError: inside another trace.
        ShapeContractError: if `path` is not a path, or `events_per_thread` is out of
            range.
        OutputError: if the file cannot be written.
    """
    if _running:
        raise TraceError(
            "trace: another trace is being recorded, by ub.trace or by python -m "
            "jax_ub trace or explain. End it first, or run the script with python."
        )
    if not is_integer(events_per_thread) or not (
        1 <= events_per_thread <= _MAX_EVENTS_PER_THREAD
    ):
        raise ShapeContractError(
            f"trace: events_per_thread = {shown(events_per_thread)} is not a number of "
            f"events. Pass 1 to {_MAX_EVENTS_PER_THREAD}."
        )
    if path is not None and not isinstance(path, str | pathlib.Path):
        raise ShapeContractError(
            f"trace: path = {shown(path)} is of type {type(path).__name__}. Pass the "
            "path of a file, or None to write none."
        )
    # The path is made absolute, because the block may change the working directory.
    output = None if path is None else checked_output(path, "trace").absolute()
    recording = Recording()
    cpu = cpu_engine.load()
    cpu.start_trace(events_per_thread)
    _running.append(recording)
    try:
        yield recording
    finally:
        cpu.stop_trace()
        _running.remove(recording)
        recording.trace = _recorded()
        if output is not None:
            if jax.process_count() > 1:
                output = part_path(output, jax.process_index())
            write(recording.trace, output)


def _recorded() -> Trace:
    recorded = cpu_engine.load().read_trace()
    backend.start()
    process = jax.process_index()
    spans = tuple(
        Span(begin, end, process, thread, *what)
        for thread, events in enumerate(recorded["threads"])
        for begin, end, *what in events
        if what[0] >= 0
    )
    calls = tuple(map(_call_from_json, recorded["calls"]))
    return Trace(calls, spans, recorded["num_dropped"])


def _call_from_json(fields: Mapping[str, Any]) -> Call:
    return Call(**{**fields, "devices": tuple(fields["devices"])})


def merge(traces: Sequence[Trace]) -> Trace:
    """Merges the traces of a job's processes. Their records of a call become one call.

    The n-th call of each trace among its equal calls is the same call of all processes.
    """
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


def write(trace: Trace, path: pathlib.Path) -> None:
    write_json(path, as_json(trace), indent=None)


def read(paths: Sequence[pathlib.Path]) -> Trace:
    """Reads the trace files of a job's processes, and merges them into one trace."""
    traces = [_read_file(path) for path in paths]
    sources: dict[int, pathlib.Path] = {}
    for path, trace in zip(paths, traces, strict=True):
        for process in {span.process for span in trace.spans}:
            if process in sources:
                raise ShapeContractError(
                    f"trace: {shown(str(sources[process]))} and {shown(str(path))} "
                    f"both have process {process}. Give one file for each process."
                )
            sources[process] = path
    return merge(traces)


def as_json(trace: Trace) -> dict[str, Any]:
    """Returns a trace as a JSON document in Chrome's trace event format.

    The key "jax_ub" is not part of the format; `read` uses it.
    """
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_track_names(trace), *_events(trace), *_arrows(trace)],
        _CATEGORY: {
            "calls": [dataclasses.asdict(call) for call in trace.calls],
            "num_dropped": trace.num_dropped,
        },
    }


def _read_file(path):
    try:
        document = json.loads(path.read_text())
        events = (e for e in document["traceEvents"] if e["ph"] == "X")
        return Trace(
            tuple(map(_call_from_json, document[_CATEGORY]["calls"])),
            tuple(Span(**event["args"]) for event in events),
            document[_CATEGORY]["num_dropped"],
        )
    except OSError as error:
        raise InputError(
            f"trace: cannot read {shown(str(path))}: {error.strerror}. {_FIX}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownNameError(
            f"trace: {shown(str(path))} is not a trace that jax_ub wrote. {_FIX}"
        ) from error


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for span in trace.spans:
        call = trace.calls[span.call]
        yield {
            "name": _title(span, call),
            "cat": _CATEGORY,
            "ph": "X",
            "ts": span.begin_ns / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "pid": span.process,
            "tid": _track(span, call),
            "args": dataclasses.asdict(span),
        }


def _title(span: Span, call: Call) -> str:
    if span.kind == CALL:
        return call.title
    if span.kind == GATHER:
        return "wait for calls"
    if span.kind == UNIT:
        return "GEMM" if span.chunk < 0 else f"GEMM of chunk {span.chunk}"
    words = [span.kind]
    if span.chunk >= 0:
        has_splits = span.split or call.num_splits > 1
        words.append(f"{span.chunk}.{span.split}" if has_splits else f"{span.chunk}")
    if span.peer >= 0:
        words.append(f"{_PREPOSITIONS.get(span.kind, 'with')} {span.peer}")
    return " ".join(words)


def _track(span: Span, call: Call) -> int:
    if 0 <= span.rank < len(call.devices) and span.kind != UNIT:
        return call.devices[span.rank]
    return _FIRST_THREAD + span.thread


def _track_names(trace: Trace) -> Iterator[dict[str, Any]]:
    tracks = {
        (span.process, _track(span, trace.calls[span.call])) for span in trace.spans
    }
    for process in sorted({process for process, _ in tracks}):
        yield _metadata("process_name", process, 0, f"process {process}")
    for process, track in sorted(tracks):
        thread = track - _FIRST_THREAD
        name = f"device {track}" if thread < 0 else f"thread {thread}"
        yield _metadata("thread_name", process, track, name)


def _metadata(kind, process, track, name):
    event = {"name": kind, "ph": "M", "pid": process, "tid": track}
    return {**event, "args": {"name": name}}


def _arrows(trace: Trace) -> Iterator[dict[str, Any]]:
    puts = {_key(s, s.rank, s.peer): s for s in trace.spans if s.kind == "put"}
    for number, wait in enumerate(s for s in trace.spans if s.kind == "wait"):
        put = puts.get(_key(wait, wait.peer, wait.rank))
        if put is None:
            continue
        for phase, span, at in (("s", put, put.end_ns - 1), ("f", wait, wait.end_ns)):
            yield {
                "name": "chunk",
                "cat": _CATEGORY,
                "ph": phase,
                "bp": "e",
                "id": number,
                "ts": at / 1e3,
                "pid": span.process,
                "tid": _track(span, trace.calls[wait.call]),
            }


def _key(span, sender, receiver):
    """Returns a key that is equal for a put and the wait that receives its data."""
    return span.call, span.payload, span.chunk, span.split, sender, receiver
