"""Records what every rank does in jax_ub's calls.

The trace is recorded from a program or from a single op (`--op`), in one process or in
several (`--processes`). `--merge` reads files that `ub.trace` wrote.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

import jax_ub as ub
from jax_ub._src.dtypes import BY_SHORT_NAME
from jax_ub._src.errors import ConfigurationError
from jax_ub._src.output import format_table
from jax_ub._src.tools import command_line, devices
from jax_ub._src.tools.command_line import (
    Shape,
    add_module,
    check_program,
    method_option,
    name_of,
    note_misplaced_options,
    parse_shape,
    positive,
    run_program,
    split_program,
    value_of,
)
from jax_ub._src.tools.devices import AXIS, FORWARD_SPECS
from jax_ub._src.tools.launch import parts
from jax_ub._src.tools.trace import traces
from jax_ub._src.tools.trace.traces import Trace

EXAMPLE = "trace --op all_gather_matmul --tp 4 --json op.json"
_NUM_WARMUP_CALLS = 2
_HEADER = (
    *("calls", "median us", "waits us", "where", "op", "method", "P"),
    "operands of a rank",
)
# Options that are valid only with --op, each with its parser and its default. In a
# multi-process trace, every process gets these options.
_OP_OPTIONS: dict[str, tuple[Callable[[str], Any], Any]] = {
    "method": (method_option, "auto"),
    "tp": (parts.count, 4),
    "shape": (parse_shape, Shape(512, 1024, 2816)),
    "dtype": (name_of(BY_SHORT_NAME), "f32"),
    "repeats": (positive, 7),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    ops = f"a single op: {', '.join(FORWARD_SPECS)}"
    add("--op", type=name_of(FORWARD_SPECS), help=ops)
    for name, (read, default) in _OP_OPTIONS.items():
        add(f"--{name}", type=value_of(read), help=f"of --op (default: {default})")
    parts.add_arguments(parser)
    merged = "merge these files, which the processes of a job wrote by ub.trace"
    add("--merge", nargs="+", type=pathlib.Path, metavar="FILE", help=merged)
    what = "the trace, for ui.perfetto.dev or chrome://tracing,"
    command_line.add_json(parser, what, has_program=True)
    add_module(parser)
    program = "a script, or the name of a module, after -m; and its arguments. "
    program += "Options of trace precede it"
    add("program", nargs=argparse.REMAINDER, metavar="script.py ...", help=program)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Records or reads a trace, writes the requested files and prints a summary.

    Returns the exit status of the traced script, or 0.
    """
    program = split_program(given.program)
    _check(given, program)
    if given.part is None:  # otherwise the process that started this one has noted it
        note_misplaced_options("trace", given, program[1:])
    status = 0
    file = None if given.json == command_line.STDOUT else given.json
    if given.merge or given.processes > 1:
        try:
            if given.merge:
                trace = traces.read(given.merge)
            else:
                trace = _record_in_processes(given, program)
        except parts.JobError as error:
            if not program:
                raise
            sys.stderr.write(f"{error}\n")
            return error.status
        if file is not None:
            traces.write(trace, file)
    else:
        run = _prepare_op(given) if given.op else _program_runner(given, program)
        # At its end, the context writes the trace of this process, even if the script
        # has failed.
        traced = traces.trace(given.part or file)
        with traced as recording, command_line.program_stdout(given):
            status = run()
        if given.part is not None:
            return status
        assert recording.trace is not None
        trace = recording.trace
    if given.op and not trace.calls:
        raise ConfigurationError(
            f"trace: no call of --op {given.op} ran on the CPU engine, and nothing "
            "else is traced. `python -m jax_ub doctor` says what can run here; on "
            "GPUs, use jax.profiler.trace."
        )
    command_line.say(given, "\n".join(summary(trace)))
    if file is None:
        command_line.write(given, traces.as_json(trace))
    return status


def summary(trace: Trace) -> list[str]:
    """Returns the lines of a table of the calls in a trace. Equal calls share a row."""
    indices: dict[tuple[Any, ...], list[int]] = {}
    for index, call in enumerate(trace.calls):
        key = (call.label, call.op, call.method, call.num_ranks, call.operands)
        indices.setdefault(key, []).append(index)
    waiting_s = trace.waiting_s()
    rows = []
    for equal in indices.values():
        call = trace.calls[equal[0]]
        median_s = traces.typical_seconds(map(trace.seconds_of, equal))
        waited_s = traces.typical_seconds(waiting_s[index] for index in equal)
        times = (f"{1e6 * median_s:.1f}", f"{1e6 * waited_s:.1f}")
        what = (call.where, call.op, call.method, call.num_ranks, call.operands)
        rows.append((len(equal), *times, *what))
    if not rows:
        return ["no call of jax_ub ran on the CPU engine"]
    lines = format_table(_HEADER, rows, right=(0, 1, 2, 6))
    if trace.num_dropped:
        lines.append(f"{trace.num_dropped} spans were dropped: the buffers were full")
    return lines


def _check(given, program):
    number = bool(given.op) + bool(program) + bool(given.merge)
    if number != 1 or (given.module and not program):
        raise ConfigurationError(
            "trace: give one of a script, --op or --merge. For example: python -m "
            "jax_ub trace --op all_gather_matmul --method ring_exchange --tp 4"
        )
    parts.check_options("trace", given)
    if given.merge and given.processes > 1:
        raise ConfigurationError(
            f"trace: --processes {given.processes} has no effect on --merge, which "
            "records nothing. Leave it out."
        )
    if program:
        check_program("trace", program[0], is_module=given.module)
    if given.op:
        _check_op(given)
        return
    for name in _OP_OPTIONS:
        if getattr(given, name) is not None:
            raise ConfigurationError(
                f"trace: --{name} {getattr(given, name)} applies to --op only. Leave "
                f"it out, or trace an op: --op {next(iter(FORWARD_SPECS))}."
            )


def _check_op(given):
    for name, (_, default) in _OP_OPTIONS.items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    if given.devices_per_process is not None:
        raise ConfigurationError(
            "trace: --devices-per-process applies to scripts. With --op, each process "
            "has --tp / --processes devices. Leave it out."
        )
    if given.tp % given.processes:
        raise ConfigurationError(
            f"trace: --tp {given.tp} is not a multiple of --processes "
            f"{given.processes}. Take a multiple."
        )
    if given.method == "xla":
        raise ConfigurationError(
            'trace: the method "xla" has no events to trace, because it is plain '
            "jax.lax. Take another --method."
        )
    if given.tp == 1 and given.method != "auto":
        raise ConfigurationError(
            f"trace: --method {given.method} has no effect on --tp 1, which runs the "
            "GEMM alone. Leave it out, or take --tp 2."
        )
    if not given.shape.divides(given.tp):
        raise ConfigurationError(
            f"trace: --shape {given.shape} does not divide into --tp {given.tp} ranks. "
            f"Take sizes that are multiples of {given.tp}."
        )


def _prepare_op(given) -> Callable[[], int]:
    """Compiles the op and calls it a few times; returns a function that repeats it."""
    is_part = given.part is not None
    if is_part:
        jax.distributed.initialize()
    devices.start("trace", given.tp, requests_cpus=not is_part)
    ranks, shape = devices.ProcessRanks(given.tp), given.shape
    if jax.process_count() > 1:
        capacity = (shape.M, max(shape.K, shape.N))
        ub.initialize_ub(capacity, given.tp, mesh=ranks.mesh, axis_name=AXIS)
    in_specs, out_spec = FORWARD_SPECS[given.op]
    function = getattr(ub, given.op)
    call = functools.partial(function, axis_name=AXIS, method=given.method)
    run = ranks.program(call, in_specs, out_spec)
    dtype, sizes = BY_SHORT_NAME[given.dtype], [*map(shape.sizes, ("MK", "KN"))]
    operands = ranks.draw(dtype, sizes, in_specs)

    def repeat(times=given.repeats):
        for _ in range(times):
            jax.block_until_ready(run(*operands))
        return 0

    repeat(_NUM_WARMUP_CALLS)
    return repeat


def _program_runner(given, program) -> Callable[[], int]:
    name, *arguments = program
    return functools.partial(run_program, name, arguments, is_module=given.module)


def _record_in_processes(given, program) -> Trace:
    arguments = ["-m", *program] if given.module else program
    num_devices = given.devices_per_process or 1
    if given.op:
        num_devices = given.tp // given.processes
        names = ("op", *_OP_OPTIONS)
        arguments = [f"--{name}={getattr(given, name)}" for name in names]
    with parts.parts_of(
        "trace",
        arguments,
        num_processes=given.processes,
        devices_per_process=num_devices,
        stdout=command_line.STDERR if given.json == command_line.STDOUT else None,
    ) as paths:
        if not all(path.exists() for path in paths):
            raise ConfigurationError(
                f"trace: the script ran in --processes {given.processes}, but not as "
                "processes of one job. Call jax.distributed.initialize() in it."
            )
        return traces.read(paths)
