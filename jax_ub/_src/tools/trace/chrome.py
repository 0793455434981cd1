"""Reads and writes traces in the JSON format of Perfetto (ui.perfetto.dev) and Chrome.

Every process is a process in the file. Every rank and every thread of the engine is a
track. An arrow connects each wait with the put that it waits for.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src.errors import UnknownNameError, shown
from jax_ub._src.files import InputError, write_json
from jax_ub._src.tools.trace.spans import UNIT, Call, Span, Trace, merged

_CATEGORY = "jax_ub"
# Track ids below this are device ids; thread n has the track id `_FIRST_THREAD + n`.
_FIRST_THREAD = 100_000


def write(trace: Trace, path: pathlib.Path) -> None:
    """Writes a trace to a JSON file that Perfetto and Chrome can open.

    Raises:
        OutputError: if the file cannot be written.
    """
    write_json(path, as_json(trace), indent=None)


def read(paths: Sequence[pathlib.Path]) -> Trace:
    """Reads the trace files of all processes of a job, and merges them on one clock.

    Raises:
        UnknownNameError: if a file is not a trace of jax_ub.
    """
    return merged([_read(path) for path in paths])


def as_json(trace: Trace) -> dict[str, Any]:
    """Returns a trace as a JSON document in Chrome's trace format.

    The key "jax_ub" is not part of the format; `read` uses it.
    """
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_names(trace), *_events(trace), *_arrows(trace)],
        _CATEGORY: {
            "calls": [dataclasses.asdict(call) for call in trace.calls],
            "num_dropped": trace.num_dropped,
        },
    }


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


def _title(span, call):
    if span.kind == "call":
        return call.label
    if span.kind == "gather":
        return "wait for calls"
    if span.kind == UNIT:
        return "GEMM" if span.chunk < 0 else f"GEMM of chunk {span.chunk}"
    piece = "" if span.chunk < 0 else f" {span.chunk}"
    split = f".{span.split}" if span.split or call.num_splits > 1 else ""
    to = {"put": "to", "wait": "from", "wait_free": "free at", "publish": "to"}
    peer = f" {to.get(span.kind, 'with')} {span.peer}" if span.peer >= 0 else ""
    return f"{span.kind}{piece}{split if piece else ''}{peer}"


def _track(span, call):
    if span.rank >= 0 and span.kind != UNIT and span.rank < len(call.devices):
        return call.devices[span.rank]
    return _FIRST_THREAD + span.thread


def _names(trace):
    tracks: dict[tuple[int, int], str] = {}
    for span in trace.spans:
        call = trace.calls[span.call]
        track = _track(span, call)
        if track < _FIRST_THREAD:
            tracks.setdefault((span.process, track), f"device {track}")
        else:
            tracks.setdefault((span.process, track), f"thread {span.thread}")
    for process in sorted({process for process, _ in tracks}):
        yield _metadata("process_name", process, 0, f"process {process}")
    for (process, track), name in sorted(tracks.items()):
        yield _metadata("thread_name", process, track, name)


def _metadata(what, process, track, name):
    return {"name": what, "ph": "M", "pid": process, "tid": track} | {
        "args": {"name": name}
    }


def _arrows(trace):
    puts = {}
    for span in trace.spans:
        if span.kind == "put":
            puts[_piece(span, span.rank, span.peer)] = span
    for number, wait in enumerate(s for s in trace.spans if s.kind == "wait"):
        put = puts.get(_piece(wait, wait.peer, wait.rank))
        if put is None:
            continue
        call = trace.calls[wait.call]
        for phase, span, at in (("s", put, put.end_ns - 1), ("f", wait, wait.end_ns)):
            yield {
                "name": "chunk",
                "cat": _CATEGORY,
                "ph": phase,
                "bp": "e",
                "id": number,
                "ts": at / 1e3,
                "pid": span.process,
                "tid": _track(span, call),
            }


def _piece(span, sender, receiver):
    return span.call, span.payload, span.chunk, span.split, sender, receiver


def _read(path):
    try:
        document = json.loads(path.read_text())
        calls = tuple(
            Call(**{**call, "devices": tuple(call["devices"])})
            for call in document[_CATEGORY]["calls"]
        )
        spans = tuple(
            Span(**event["args"])
            for event in document["traceEvents"]
            if event["ph"] == "X"
        )
        return Trace(calls, spans, document[_CATEGORY]["num_dropped"])
    except OSError as error:
        raise InputError(
            f"trace: cannot read {shown(str(path))}: {error.strerror}."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownNameError(
            f"trace: {shown(str(path))} is not a trace that jax_ub wrote. Give the "
            "files of ub.trace or `python -m jax_ub trace --json`."
        ) from error
