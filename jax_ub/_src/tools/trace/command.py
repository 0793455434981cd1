"""Records what every rank does in jax_ub's calls: `python -m jax_ub trace`.

The trace is recorded from a program (`trace [options] script.py ...`) or from a single
op (`trace --op all_gather_matmul --method ring_exchange --tp 4`), in one process or in
several (`--processes`). `trace --merge step.*.json` reads files that `ub.trace` wrote.
"""

import argparse
import contextlib
import pathlib
import sys
import tempfile

import jax

from jax_ub._src import dtypes
from jax_ub._src.errors import UbError, nearest, shown
from jax_ub._src.files import output_path, picture_path
from jax_ub._src.runtime import settings
from jax_ub._src.tools import options
from jax_ub._src.tools.launch.parts import devices_of_each, run_parts
from jax_ub._src.tools.trace import chrome, demonstration, picture, record
from jax_ub._src.tools.trace.demonstration import Demonstration
from jax_ub._src.tools.trace.script import is_script, run_script
from jax_ub._src.tools.trace.spans import Trace

_DTYPES = tuple(dtypes.SHORT_NAMES)


class TraceArgumentError(UbError, ValueError):
    """Raised when the arguments of `trace` are invalid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `trace` to its argument parser."""
    add = parser.add_argument
    add("--op", help=f"an op on its own: {', '.join(demonstration.OPS)}")
    add("--method", default="auto", help="of --op (default: auto)")
    add("--tp", type=int, default=4, help="ranks of --op (default: 4)")
    add("--shape", default="512x1024x2816", help="MxKxN of --op (512x1024x2816)")
    add("--dtype", default="float32", help="of --op (default: float32)")
    add("--repeats", type=int, default=7, help="calls of --op (default: 7)")
    add("--processes", type=int, default=1, help="run it in this many processes")
    add(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="of a script with --processes: CPU devices of each, or GPUs (default: 1)",
    )
    add("--merge", nargs="+", type=pathlib.Path, metavar="FILE", help="read these")
    add("--json", type=output_path, help="for ui.perfetto.dev or chrome://tracing")
    add("--png", type=picture_path, help="draw the typical call (matplotlib)")
    add("--label", help="draw the typical call of this label instead")
    # Internal: --processes starts each process with --part. The path is its output
    # file; the process index is inserted into the name.
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="a program and its arguments",
    )
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Records or reads a trace, writes the requested files and prints a summary.

    Returns the exit status of the traced script, or 0.
    """
    # Before Python 3.13, argparse keeps the "--" that ends the options of trace.
    given.program = given.program[given.program[:1] == ["--"] :]
    _check(given)
    if given.png is not None:
        options.load_pyplot("trace: --png")
    status = 0
    if given.merge:
        found = chrome.read(given.merge)
    elif given.processes > 1:
        found = _in_processes(given)
    else:
        found, status = _here(given)
        if given.part is not None:
            return status
    if given.json is not None:
        chrome.write(found, given.json)
    if given.png is not None:
        picture.draw(found, given.png, _chosen(found, given.label))
    sys.stdout.write("\n".join(summary(found)) + "\n")
    return status


def summary(trace: Trace) -> list[str]:
    """Returns a line of text per label: calls, median time, average wait of a rank.

    The average wait is the time that a rank waits for other ranks in a call.
    """
    lines = [f"{'calls':>6} {'median us':>10} {'waits us':>10}  call"]
    exposed = trace.exposed_s()
    for label in dict.fromkeys(call.label for call in trace.calls):
        indices = [i for i, call in enumerate(trace.calls) if call.label == label]
        times = sorted(trace.seconds_of(index) for index in indices)
        call = trace.calls[indices[0]]
        lines.append(
            f"{len(indices):>6} {1e6 * times[len(times) // 2]:>10.1f} "
            f"{1e6 * exposed[label]:>10.1f}  {label}, {call.method}, "
            f"P = {call.num_ranks}"
        )
    if trace.num_dropped:
        lines.append(f"{trace.num_dropped} spans were dropped: there was no room")
    return lines


def _check(given):
    wanted = [bool(given.op), bool(given.program), bool(given.merge)]
    if sum(wanted) != 1:
        raise TraceArgumentError(
            "trace: give one of a script, --op or --merge. For example: python -m "
            "jax_ub trace --op all_gather_matmul --method ring_exchange --tp 4"
        )
    if given.processes < 1:
        raise TraceArgumentError(
            f"trace: --processes {given.processes} is not positive. Take 1 or more."
        )
    devices_of_each("trace", given.devices_per_process, given.processes)
    if given.op and given.devices_per_process is not None:
        raise TraceArgumentError(
            "trace: --devices-per-process is of a script; an op has --tp / --processes "
            "in each. Leave it out."
        )
    if given.program and not is_script(given.program[0]):
        raise TraceArgumentError(
            f"trace: there is no script {shown(given.program[0])}."
        )
    if given.label is not None and given.png is None:
        raise TraceArgumentError(
            f"trace: --label {shown(given.label)} is what a picture shows. Add --png."
        )
    for path in given.merge or ():
        if not path.is_file():
            raise TraceArgumentError(
                f"trace: --merge: there is no file {shown(str(path))}."
            )
    if given.op:
        _check_op(given)


def _check_op(given):
    if given.op not in demonstration.OPS:
        raise TraceArgumentError(
            f"trace: op {shown(given.op)} is not known. "
            f"{nearest(given.op, demonstration.OPS)}"
        )
    if given.repeats < 1:
        raise TraceArgumentError(
            f"trace: --repeats {given.repeats} is not positive. Take 1 or more."
        )
    if given.dtype not in _DTYPES:
        raise TraceArgumentError(
            f"trace: --dtype {shown(given.dtype)} is not known. "
            f"{nearest(given.dtype, _DTYPES)}"
        )
    if given.tp < 1 or given.tp % given.processes:
        raise TraceArgumentError(
            f"trace: --tp {given.tp} does not divide into --processes "
            f"{given.processes}. Take a multiple of it."
        )
    sizes = given.shape.split("x")
    if len(sizes) != 3 or not all(
        s.isdecimal() and int(s) % given.tp == 0 for s in sizes
    ):
        raise TraceArgumentError(
            f"trace: --shape {shown(given.shape)} is not MxKxN of multiples of --tp "
            f"{given.tp}, such as 512x1024x2816."
        )


def _here(given):
    """Records a trace in this process; returns it and the script's exit status."""
    status = 0
    if given.op:
        repeat = _demonstration(given).prepare()
        with record.trace(given.part) as recording:
            repeat()
    else:
        with record.trace(given.part) as recording:
            status = run_script(given.program[0], given.program[1:])
    return recording.trace, status


def _demonstration(given):
    settings.set_pool_threads(4 * given.tp)
    M, K, N = map(int, given.shape.split("x"))
    if given.part is not None:
        jax.distributed.initialize()
    elif getattr(jax.config, "jax_num_cpu_devices", 0) < given.tp:
        # If JAX has already started, its number of devices cannot be changed.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", given.tp)
    return Demonstration(
        given.op, given.method, given.tp, M, K, N, given.dtype, given.repeats
    )


def _in_processes(given):
    with tempfile.TemporaryDirectory() as folder:
        part = pathlib.Path(folder, "trace.json")
        options = ["--part", str(part)]
        devices = devices_of_each("trace", given.devices_per_process, given.processes)
        if given.op:
            devices = given.tp // given.processes
            for name in ("op", "method", "tp", "shape", "dtype", "repeats"):
                options += [f"--{name}", str(getattr(given, name))]
        status = run_parts(
            ["trace", *options, *given.program],
            num_processes=given.processes,
            devices_per_process=devices,
            folder=folder,
        )
        if status:
            raise TraceArgumentError(
                f"trace: the processes failed with exit status {status}; what they "
                "wrote says why."
            )
        parts = record.of_every_process(part, given.processes)
        if part.exists() or not all(path.exists() for path in parts):
            raise TraceArgumentError(
                f"trace: the script ran in --processes {given.processes}, but not as "
                "processes of one job. Call jax.distributed.initialize() in it."
            )
        return chrome.read(parts)


def _chosen(trace, label):
    if label is None:
        return None
    labels = [call.label for call in trace.calls]
    if label not in labels:
        raise TraceArgumentError(
            f"trace: no call is named {shown(label)}. "
            f"{nearest(label, dict.fromkeys(labels))}"
        )
    indices = [index for index, found in enumerate(labels) if found == label]
    return sorted(indices, key=trace.seconds_of)[len(indices) // 2]
