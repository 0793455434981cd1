"""Records traces: starts and stops the CPU engine's recorder and reads its events."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, UbError, shown
from jax_ub._src.runtime import backend, cpu_engine
from jax_ub._src.tools.trace import chrome
from jax_ub._src.tools.trace.spans import Call, Span, Trace

EVENTS_PER_THREAD = 1 << 16
_MOST_EVENTS_PER_THREAD = 1 << 24


class TraceError(UbError, RuntimeError):
    """Raised when a trace is started inside another one."""


class Recording:
    """The object that `trace` yields; its `trace` is set when the block has ended."""

    def __init__(self):
        """Creates a recording whose `trace` is None."""
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

    Open the file at ui.perfetto.dev, or draw it with `python -m jax_ub trace --merge
    step.json --png step.png`. Wait for the results inside the block, because JAX
    dispatches asynchronously. In a multi-process job, each process writes its own file,
    "step.0.json" and so on; pass all of them to `--merge`.

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
            "trace: one is being recorded already, by ub.trace or by python -m jax_ub "
            "trace. End it first."
        )
    if not shapes.is_integer(events_per_thread) or not (
        1 <= events_per_thread <= _MOST_EVENTS_PER_THREAD
    ):
        raise ShapeContractError(
            f"trace: events_per_thread = {shown(events_per_thread)} is not a number of "
            f"events. Pass 1 to {_MOST_EVENTS_PER_THREAD}."
        )
    if path is not None and not isinstance(path, str | pathlib.Path):
        raise ShapeContractError(
            f"trace: path = {shown(path)} is of type {type(path).__name__}. Pass the "
            "path of a file, or None to write none."
        )
    recording = Recording()
    cpu = cpu_engine.load()
    cpu.start_trace(events_per_thread)
    _running.append(recording)
    try:
        yield recording
    finally:
        cpu.stop_trace()
        _running.remove(recording)
        recording.trace = read()
        if path is not None:
            chrome.write(recording.trace, of_process(pathlib.Path(path)))


def read() -> Trace:
    """Returns the trace that the CPU engine has recorded in this process."""
    found = cpu_engine.load().read_trace()
    backend.start()
    process = jax.process_index()
    calls = tuple(
        Call(**{**call, "devices": tuple(call["devices"])}) for call in found["calls"]
    )
    spans = tuple(
        Span(begin, end, process, thread, *what)
        for thread, spans in enumerate(found["threads"])
        for begin, end, *what in spans
        if what[0] >= 0
    )
    return Trace(calls, spans, found["num_dropped"])


def of_process(path: pathlib.Path) -> pathlib.Path:
    """Returns the trace file of this process for the path that the user passed.

    In a multi-process job, the process index is inserted, as in "out.1.json".
    """
    if jax.process_count() == 1:
        return path
    return path.with_suffix(f".{jax.process_index()}{path.suffix}")


def of_every_process(path: pathlib.Path, num_processes: int) -> list[pathlib.Path]:
    """Returns the trace files of all processes of a job, by process index.

    The index is inserted before the suffix of `path`, as in "out.1.json".
    """
    return [
        path.with_suffix(f".{process}{path.suffix}") for process in range(num_processes)
    ]
