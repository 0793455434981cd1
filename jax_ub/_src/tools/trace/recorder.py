"""Records traces: starts and stops the CPU engine's recorder and reads its events."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

from jax_ub._src import checks
from jax_ub._src.errors import ShapeContractError, TraceError, shown
from jax_ub._src.files import checked_output
from jax_ub._src.runtime import backend, cpu_engine
from jax_ub._src.tools.launch.parts import part_path
from jax_ub._src.tools.trace import spans
from jax_ub._src.tools.trace.spans import Span, Trace, call_from_json

EVENTS_PER_THREAD = 1 << 16
_MAX_EVENTS_PER_THREAD = 1 << 24


class Recording:
    """The object that `ub.trace` yields; its `trace` is set when the block ends."""

    def __init__(self):
        self.trace: Trace | None = None


_running: list[Recording] = []


@contextlib.contextmanager
def trace(
    path: str | pathlib.Path | None = None,
    *,
    events_per_thread: int = EVENTS_PER_THREAD,
) -> Iterator[Recording]:
    """Records when each rank computes, sends and waits in jax_ub's calls in the block.

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
    if not checks.is_integer(events_per_thread) or not (
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
    output = None if path is None else checked_output(path, "trace")
    recording = Recording()
    cpu = cpu_engine.load()
    cpu.start_trace(events_per_thread)
    _running.append(recording)
    try:
        yield recording
    finally:
        cpu.stop_trace()
        _running.remove(recording)
        recording.trace = _read()
        if output is not None:
            if jax.process_count() > 1:
                output = part_path(output, jax.process_index())
            spans.write(recording.trace, output)


def _read() -> Trace:
    recorded = cpu_engine.load().read_trace()
    backend.start()
    process = jax.process_index()
    spans = tuple(
        Span(begin, end, process, thread, *what)
        for thread, events in enumerate(recorded["threads"])
        for begin, end, *what in events
        if what[0] >= 0
    )
    calls = tuple(map(call_from_json, recorded["calls"]))
    return Trace(calls, spans, recorded["num_dropped"])
