"""Times every op of jax_ub against XLA's fastest programs on this machine."""

import argparse
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ub._src import dtypes, lowering_log
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.runtime import settings
from jax_ub._src.scaled_array import MXFP8_BLOCK
from jax_ub._src.tools import command_line, devices
from jax_ub._src.tools.bench import cases, measure, report
from jax_ub._src.tools.bench.cases import Options
from jax_ub._src.tools.bench.gemm import ACCUMULATING, VARIANTS
from jax_ub._src.tools.bench.measure import (
    FIXED_SHAPES,
    FP8_OPS,
    JOB_OPS,
    OPS,
    Runner,
)
from jax_ub._src.tools.bench.report import Result
from jax_ub._src.tools.command_line import (
    check_divides,
    list_of,
    method_option,
    names_of,
    parse_shape,
    positive,
)
from jax_ub._src.tools.launch.parts import count

EXAMPLE = "bench --ops all_gather_matmul --shapes 512x1024x2816 --devices 2"
DTYPES = {
    **{name: dtypes.BY_SHORT_NAME[name] for name in ("bf16", "f32")},
    **{name: name for name in cases.FP8_RECIPES},
}
# Format version in the JSON; incremented when a key changes its meaning.
SCHEMA = 1
# Default number of timed rounds with --processes. It is lower than in one process,
# because a round takes longer: all processes and process 0 alone run their programs in
# turn.
_PROCESS_ROUNDS = 7
# Options that have no effect on an op. All methods but "xla" run local GEMMs alike.
_WITHOUT = {
    **dict.fromkeys(("gemm", *ACCUMULATING), {"method"}),
    "latency": {"shapes"},
    "small": {"shapes"},
    "barrier": {"shapes", "dtypes", "method", "rounds", "patience"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    some = f"some of {', '.join(OPS)} (default: all); with --processes also barrier"
    add("--ops", type=names_of([*OPS, "barrier"]), help=some)
    add("--devices", type=list_of(count), help="numbers of ranks P (default: 1,2,4,8)")
    some_dtypes = f"some of {', '.join(DTYPES)} (default: bf16,f32)"
    add("--dtypes", type=names_of(DTYPES), help=some_dtypes)
    four = ", ".join(map(str, Options.shapes))
    shapes = f"global sizes MxKxN, such as 512x1024x2816 (default: {four})"
    add("--shapes", type=list_of(parse_shape), help=shapes)
    variants = f"of the op gemm: {', '.join(VARIANTS)} (default: all)"
    add("--variants", type=names_of(VARIANTS), help=variants)
    threads = "values of JAX_UB_NUM_THREADS to compare with the first, such as 2,16"
    add("--threads", type=list_of(positive), help=threads)
    rounds = "timed calls of each program (default: 11; with --processes "
    rounds += f"{_PROCESS_ROUNDS}, with --quick 3)"
    add("--rounds", type=positive, help=rounds)
    patience = "run up to this many times as many rounds, and keep the calmest "
    patience += "(default: 1)"
    add("--patience", type=positive, help=patience)
    add("--method", type=method_option, help="the method under test (default: auto)")
    platforms = ("cpu", "cuda")
    add("--platform", default="cpu", choices=platforms, help="(default: cpu)")
    add("--quick", action="store_true", help="tiny shapes and few rounds, as a check")
    command_line.add_json(parser, "all figures")
    several = "numbers of processes, such as 2,4, with one rank each; XLA uses gloo"
    add("--processes", type=list_of(count), help=several)
    # Internal: with --processes, the benchmark starts processes with this option, which
    # is the path for their results.
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def options(given: argparse.Namespace) -> Options:
    """Returns the options of a command line, completed with defaults and checked."""
    in_job = given.processes is not None
    chosen: dict[str, Any] = {"ops": tuple(OPS)}
    if in_job:
        chosen = {"ops": JOB_OPS, "rounds": _PROCESS_ROUNDS}
    if given.quick:
        chosen |= {"devices": (1, 2), "shapes": cases.QUICK_SHAPES, "rounds": 3}
    for field in dataclasses.fields(Options):
        value = getattr(given, field.name)
        if value is not None:
            chosen[field.name] = value
    if given.dtypes is not None:
        chosen["dtypes"] = tuple(DTYPES[name] for name in given.dtypes)
    if given.threads is not None:
        chosen["threads"] = tuple(dict.fromkeys(given.threads))
    found = Options(**chosen)
    unmeasured = _unmeasured(given, found)
    # Without --ops, the ops are those that have cases with these options.
    named = [] if given.ops is None else unmeasured.values()
    for reason in (*_conflicts(given, found), *named):
        raise UnsupportedOverlapError(f"bench: {reason}")
    known = JOB_OPS if in_job else found.ops
    measured = tuple(op for op in known if op in found.ops and op not in unmeasured)
    found = dataclasses.replace(found, ops=measured)
    if in_job:
        found = dataclasses.replace(found, devices=given.processes)
    _check_shapes(found, "--processes" if in_job else "--devices")
    return found


def _check_shapes(found, option):
    for op in found.ops:
        shapes = FIXED_SHAPES.get(op, found.shapes)
        for shape, num_ranks in itertools.product(shapes, found.devices):
            if op in FIXED_SHAPES and not shape.divides(num_ranks):
                raise ShapeContractError(
                    f"bench: {op} has fixed sizes, and {shape} does not divide into "
                    f"{num_ranks} ranks. Give --ops without {op}, or leave {num_ranks} "
                    f"out of {option}."
                )
            check_divides("bench", shape, num_ranks, option)
            if "mxfp8" in found.dtypes and op in FP8_OPS:
                _check_blocks(op, shape, num_ranks)


def _check_blocks(op, shape, num_ranks):
    """Raises an error unless blocks of MXFP8 divide what the GEMMs contract over."""
    least_N = MXFP8_BLOCK * num_ranks
    is_column = op in ("all_gather_matmul", "linear_pair")
    is_row = op != "all_gather_matmul"
    if (is_column and shape.K % MXFP8_BLOCK) or (is_row and shape.N % least_N):
        raise ShapeContractError(
            f"bench: {op} cannot divide shape {shape} into the blocks of mxfp8 on "
            f"{num_ranks} ranks. Take a K that is a multiple of {MXFP8_BLOCK}, and an "
            f"N that is a multiple of {least_N}."
        )


def _conflicts(given: argparse.Namespace, found: Options) -> Iterator[str]:
    """Yields why options of a command line, `given`, have no effect.

    `found` has the options with their defaults.
    """
    ops, on_gpus = set(found.ops), given.platform == "cuda"
    fp8 = ",".join(name for name in found.dtypes if name in cases.FP8_RECIPES)
    of_one_process = {
        "--devices": given.devices,
        "--platform cuda": on_gpus,
        "--threads": given.threads,
        f"--dtypes {fp8}": fp8,
    }
    for option, value in of_one_process.items():
        if given.processes is not None and value:
            yield f"{option} has no effect with --processes. Leave one of them out."
    if 1 in (given.processes or ()):
        yield "--processes 1 compares no processes. Give 2 or more."
    if given.threads and on_gpus:
        yield "--platform cuda has no effect with --threads. Leave one of them out."
    if fp8 and ops.isdisjoint(FP8_OPS):
        yield _without_fp8(found.ops)
    if found.variants and "gemm" not in ops:
        yield "--variants are those of the op gemm. Add gemm to --ops."
    if found.variants and 1 not in found.devices:
        yield "--variants are those of the op gemm, on one device. Add 1 to --devices."
    if given.part is None:  # the processes of a job get all options, also the defaults
        for option in _unread(given, found.ops):
            yield f"--{option} has no effect on {_names(found.ops)}. Leave it out."


def _unread(given, ops):
    """Yields the given options that none of the ops reads."""
    for option in ("shapes", "dtypes", "method", "rounds", "patience"):
        value = getattr(given, option)
        if value == "auto" or (value == "xla" and "barrier" not in ops):
            continue  # the default, or a local GEMM of XLA
        if value is not None and all(option in _WITHOUT.get(op, ()) for op in ops):
            yield option


def _without_fp8(ops):
    return f"none of {','.join(ops)} has FP8 operands. Take some of {_names(FP8_OPS)}."


def _unmeasured(given: argparse.Namespace, found: Options) -> dict[str, str]:
    """Returns the ops that have no case with these options, each with the reason."""
    reasons: dict[str, str] = {}

    def leave_out(ops, reason):
        reasons.update(dict.fromkeys(ops, reason))

    if given.processes is not None:
        others = [op for op in found.ops if op not in JOB_OPS]
        some, named = _names(JOB_OPS), ",".join(others)
        leave_out(
            others, f"none of {named} is compared over processes. Take some of {some}."
        )
        if found.method != "auto":
            reason = "latency between processes is that of ub.all_reduce, which has no "
            leave_out(["latency"], f"{reason}method. Leave --method out, or latency.")
        elif "float32" not in found.dtypes:
            reason = "latency between processes is timed in f32. Add f32 to --dtypes."
            leave_out(["latency"], reason)
    else:
        leave_out(["barrier"], "a barrier is between processes. Add --processes 2.")
        if 1 not in found.devices:
            leave_out(["gemm"], "the op gemm runs on one device. Add 1 to --devices.")
        if set(found.devices) <= {1}:
            leave_out(["latency"], "latency is between ranks. Add 2 to --devices.")
        if set(found.dtypes) <= set(cases.FP8_RECIPES):
            others = [op for op in found.ops if op not in FP8_OPS]
            leave_out(others, f"{_without_fp8(others)} Or add bf16 to --dtypes.")
    return {op: reasons[op] for op in found.ops if op in reasons}


def _names(ops):
    return ", ".join(ops)


def command(given: argparse.Namespace) -> int:
    """Runs the benchmark of a parsed command line; returns the exit status."""
    chosen = options(given)
    settings.check()  # before any process is started
    if given.part is not None:
        measure.run_part(given.part, chosen)
    elif given.processes is not None:
        _run_processes(given, chosen)
    else:
        devices.start("bench", max(chosen.devices), given.platform)
        about, measured = report.environment(), measure.measure(chosen, Runner())
        rounds = f"{chosen.rounds} rounds"
        _report(given, chosen, about, rounds, measured, lowering_log.fallbacks)
    return 0


def _run_processes(given, chosen):
    """Runs a multi-process job for each number in `--processes`; prints all results."""
    numbers = command_line.progress("bench", given.processes)
    jobs = [measure.run_job(number, chosen) for number in numbers]
    about, _, _ = jobs[0]
    by_op = sorted(
        (result for _, results, _ in jobs for result in results),
        key=lambda result: chosen.ops.index(result.case.op),
    )
    fallbacks = list(dict.fromkeys(each for *_, every in jobs for each in every))
    rounds = f"{chosen.rounds} rounds of the slowest process, XLA with gloo"
    _report(given, chosen, about, rounds, by_op, lambda: fallbacks)


def _report(given, chosen, about, rounds, measured, fallbacks):
    """Prints a table for each op, as soon as it is `measured`, and writes the JSON."""
    title = report.describe(about, f'method "{chosen.method}", {rounds}')
    command_line.say(given, title)
    results: list[Result] = []

    def write(is_complete):
        document = {
            "schema": SCHEMA,
            **about,
            "options": dataclasses.asdict(chosen),
            "results": [result.as_json() for result in results],
            "fallbacks": [dataclasses.asdict(each) for each in fallbacks()],
        }
        command_line.write(given, document, is_complete=is_complete)

    for _, group in itertools.groupby(measured, key=lambda result: result.case.op):
        start = len(results)
        try:
            for result in group:
                results.append(result)
                write(is_complete=False)
        finally:  # an interrupted run prints and leaves its results
            command_line.say(given, f"\n{report.table(results[start:])}")
    command_line.say(given, report.sections(results, fallbacks()), end="")
    write(is_complete=True)
