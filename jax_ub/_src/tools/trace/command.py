"""Records what every rank does in jax_ub's calls.

The trace is recorded from a program or from a single op (`--op`), in one process or in
several (`--processes`). `--merge` reads files that `ub.trace` wrote.
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ub as ub
from jax_ub._src.dtypes import SHORT_NAMES
from jax_ub._src.errors import UbError, UnsupportedOverlapError, shown
from jax_ub._src.runtime import backend, settings
from jax_ub._src.tables import format_table
from jax_ub._src.tools.launch import parts
from jax_ub._src.tools.options import name_of, output_path, positive
from jax_ub._src.tools.script import check_script, run_script, split_program
from jax_ub._src.tools.trace import perfetto, recorder
from jax_ub._src.tools.trace.spans import Trace

EXAMPLE = "trace --op all_gather_matmul --tp 4 --json op.json"
_AXIS = "tp"
_NUM_WARMUP_CALLS = 2
_ROWS, _COLUMNS = PartitionSpec(_AXIS), PartitionSpec(None, _AXIS)
# For each op, its function and the shardings of x [M, K], w [K, N] and the result [M,
# N].
_OPS: dict[str, tuple[Callable[..., Any], tuple[Any, Any], Any]] = {
    "all_gather_matmul": (ub.all_gather_matmul, (_ROWS, _COLUMNS), _COLUMNS),
    "matmul_reduce_scatter": (ub.matmul_reduce_scatter, (_COLUMNS, _ROWS), _ROWS),
    "matmul_all_reduce": (ub.matmul_all_reduce, (_COLUMNS, _ROWS), PartitionSpec()),
}
# The options of --op that are passed on to each process of a multi-process trace.
_OP_OPTIONS = ("op", "method", "tp", "shape", "dtype", "repeats")


class TraceArgumentError(UbError, ValueError):
    """Raised if the arguments of `python -m jax_ub trace` are invalid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", type=name_of(_OPS), help=f"a single op: {', '.join(_OPS)}")
    add("--method", default="auto", help="of --op (default: auto)")
    add("--tp", type=positive, default=4, help="ranks of --op (default: 4)")
    add("--shape", default="512x1024x2816", help="MxKxN of --op (512x1024x2816)")
    add(
        "--dtype",
        type=name_of(SHORT_NAMES),
        default="float32",
        help="of --op (default: float32)",
    )
    add("--repeats", type=positive, default=7, help="calls of --op (default: 7)")
    parts.add_arguments(parser)
    add("--merge", nargs="+", type=pathlib.Path, metavar="FILE", help="read these")
    add("--json", type=output_path, help="for ui.perfetto.dev or chrome://tracing")
    for removed in ("--png", "--label"):
        add(removed, type=_removed, help=argparse.SUPPRESS)
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="a program and its arguments",
    )
    parser.set_defaults(run=command)


def _removed(value: str) -> str:
    raise argparse.ArgumentTypeError(
        "trace no longer draws pictures. Write --json FILE and open the file in "
        "Perfetto, https://ui.perfetto.dev."
    )


def command(given: argparse.Namespace) -> int:
    """Records or reads a trace, writes the requested files and prints a summary.

    Returns the exit status of the traced script, or 0.
    """
    program = split_program(given.program)
    _check(given, program)
    status = 0
    if given.merge:
        trace = perfetto.read(given.merge)
    elif given.processes > 1:
        trace = _record_in_processes(given, program)
    else:
        repeat = _prepare_op(given) if given.op else None
        with recorder.trace(given.part) as recording:
            status = repeat() if repeat else run_script(program[0], program[1:])
        if given.part is not None:
            return status
        assert recording.trace is not None
        trace = recording.trace
    if given.json is not None:
        perfetto.write(trace, given.json)
    sys.stdout.write("\n".join(summary(trace)) + "\n")
    return status


def summary(trace: Trace) -> list[str]:
    """Returns a table of a trace: for each call, its median time and average wait.

    A rank waits while it needs data from other ranks.
    """
    indices: dict[str, list[int]] = {}
    for index, call in enumerate(trace.calls):
        indices.setdefault(call.label, []).append(index)
    waiting_s = trace.waiting_s()
    rows = []
    for label, equal in indices.items():
        call = trace.calls[equal[0]]
        median_s = statistics.median_high(map(trace.seconds_of, equal))
        mean_s = statistics.fmean(waiting_s[index] for index in equal)
        text = f"{label}, {call.method}, P = {call.num_ranks}"
        rows.append((len(equal), f"{1e6 * median_s:.1f}", f"{1e6 * mean_s:.1f}", text))
    header = ("calls", "median us", "waits us", "call")
    lines = format_table(header, rows, right=(0, 1, 2))
    if trace.num_dropped:
        lines.append(f"{trace.num_dropped} spans were dropped: the buffers were full")
    return lines


def _check(given, program):
    if bool(given.op) + bool(program) + bool(given.merge) != 1:
        raise TraceArgumentError(
            "trace: give one of a script, --op or --merge. For example: python -m "
            "jax_ub trace --op all_gather_matmul --method ring_exchange --tp 4"
        )
    parts.check_options("trace", given)
    if program:
        check_script("trace", program[0])
    if not given.op:
        return
    if given.devices_per_process is not None:
        raise TraceArgumentError(
            "trace: --devices-per-process applies to scripts. With --op, each process "
            "has --tp / --processes devices. Leave it out."
        )
    if given.tp % given.processes:
        raise TraceArgumentError(
            f"trace: --tp {given.tp} is not a multiple of --processes "
            f"{given.processes}. Take a multiple."
        )
    sizes = given.shape.split("x")
    if len(sizes) != 3 or not all(
        size.isdecimal() and int(size) % given.tp == 0 for size in sizes
    ):
        raise TraceArgumentError(
            f"trace: --shape {shown(given.shape)} is not MxKxN of multiples of --tp "
            f"{given.tp}, such as 512x1024x2816."
        )


def _prepare_op(given) -> Callable[[], int]:
    """Compiles an op and warms it up; returns a function that runs it repeatedly."""
    settings.set_pool_threads(4 * given.tp)
    if given.part is not None:
        jax.distributed.initialize()
    else:
        backend.request_cpu_devices(given.tp)
    devices = backend.start()
    if len(devices) < given.tp:
        raise UnsupportedOverlapError(
            f"trace: --tp {given.tp}, but there are {len(devices)} devices. Take fewer."
        )
    M, K, N = map(int, given.shape.split("x"))
    mesh = Mesh(np.array(devices[: given.tp]), (_AXIS,))
    if jax.process_count() > 1:
        ub.initialize_ub((M, max(K, N)), given.tp, mesh=mesh, axis_name=_AXIS)
    function, in_specs, out_spec = _OPS[given.op]

    def program(x, w):
        return function(x, w, axis_name=_AXIS, method=given.method)

    def operand(shape, spec):
        draws = np.random.default_rng(0).standard_normal(shape, np.float32)
        array = draws.astype(np.dtype(given.dtype))
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    run = jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=in_specs, out_specs=out_spec)
    )
    operands = [*map(operand, ((M, K), (K, N)), in_specs)]

    def repeat(times=given.repeats):
        for _ in range(times):
            jax.block_until_ready(run(*operands))
        return 0

    repeat(_NUM_WARMUP_CALLS)
    return repeat


def _record_in_processes(given, program) -> Trace:
    arguments, devices = program, given.devices_per_process or 1
    if given.op:
        devices = given.tp // given.processes
        arguments = [f"--{name}={getattr(given, name)}" for name in _OP_OPTIONS]
    with parts.parts_of(
        "trace",
        arguments,
        num_processes=given.processes,
        devices_per_process=devices,
    ) as (status, paths):
        if status:
            raise TraceArgumentError(
                f"trace: the processes failed with exit status {status}. Their output "
                "gives the reason."
            )
        if not all(path.exists() for path in paths):
            raise TraceArgumentError(
                f"trace: the script ran in --processes {given.processes}, but not as "
                "processes of one job. Call jax.distributed.initialize() in it."
            )
        return perfetto.read(paths)
