"""Reads and writes traces in the JSON format of Perfetto (ui.perfetto.dev) and Chrome.

Every process is a process in the file. Every rank and every thread of the engine is a
track. An arrow connects each wait with the put that it waits for.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src.errors import (
    InputError,
    ShapeContractError,
    UnknownNameError,
    shown,
)
from jax_ub._src.files import write_json
from jax_ub._src.tools.trace.spans import (
    CALL,
    GATHER,
    UNIT,
    Call,
    Span,
    Trace,
    call_from_json,
    merge,
)

_CATEGORY = "jax_ub"
# Track ids below this are device ids; thread n has the track id `_FIRST_THREAD + n`.
_FIRST_THREAD = 100_000
# The preposition before the peer in a span's title, by the kind of the span.
_PREPOSITIONS = {"put": "to", "wait": "from", "wait_free": "free at", "publish": "to"}


def write(trace: Trace, path: pathlib.Path) -> None:
    write_json(path, as_json(trace), indent=None)


def read(paths: Sequence[pathlib.Path]) -> Trace:
    """Reads the trace files of a job's processes, and merges them on one clock."""
    traces = [_read(path) for path in paths]
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


def _read(path):
    try:
        document = json.loads(path.read_text())
        events = (e for e in document["traceEvents"] if e["ph"] == "X")
        return Trace(
            tuple(map(call_from_json, document[_CATEGORY]["calls"])),
            tuple(Span(**event["args"]) for event in events),
            document[_CATEGORY]["num_dropped"],
        )
    except OSError as error:
        raise InputError(
            f"trace: cannot read {shown(str(path))}: {error.strerror}."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownNameError(
            f"trace: {shown(str(path))} is not a trace that jax_ub wrote. Give the "
            "files of ub.trace or `python -m jax_ub trace --json`."
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
    """Returns a key that a put and the wait for the same data have in common."""
    return span.call, span.payload, span.chunk, span.split, sender, receiver
