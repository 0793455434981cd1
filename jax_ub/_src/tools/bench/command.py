"""Times every op of jax_ub against XLA's fastest programs on this machine."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src import dtypes, lowering_log
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.runtime import settings
from jax_ub._src.tools import command_line, devices, timing
from jax_ub._src.tools.bench import cases, latency, linear, processes, report
from jax_ub._src.tools.bench.cases import Builder, Case, Options, Setup
from jax_ub._src.tools.bench.fused import fused
from jax_ub._src.tools.bench.gemm import VARIANTS, dgrad_add, gemm, wgrad_accumulate
from jax_ub._src.tools.bench.linear import LINEAR_OPS
from jax_ub._src.tools.bench.peers import FastestDots
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
OPS: dict[str, Builder] = {
    "gemm": gemm,
    **{name: functools.partial(linear.linear, op) for name, op in LINEAR_OPS.items()},
    "dgrad_add": dgrad_add,
    "wgrad_accumulate": wgrad_accumulate,
    "fused": fused,
    "latency": latency.latency,
    "small": linear.small,
}
FP8_OPS = tuple(LINEAR_OPS)
# Fixed sizes of the ops that ignore --shapes. A barrier between processes has none.
_FIXED_SHAPES = {
    "latency": [latency.LATENCY_SHAPE],
    "small": [*linear.SMALL_SHAPES.values()],
    "barrier": [],
}
# Format version in the JSON; incremented when a key changes its meaning.
SCHEMA = 1
# Default number of timed rounds with --processes. It is lower than in one process,
# because a round takes longer: all processes and process 0 alone run their programs in
# turn.
_PROCESS_ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    known = ", ".join(OPS)
    some = f"some of {known} (default: all); with --processes also barrier"
    add("--ops", type=names_of([*OPS, "barrier"]), help=some)
    add("--devices", type=list_of(count), help="numbers of ranks P (default: 1,2,4,8)")
    some_dtypes = f"some of {', '.join(DTYPES)} (default: bf16,f32)"
    add("--dtypes", type=names_of(DTYPES), help=some_dtypes)
    shapes = "global sizes MxKxN, such as 512x1024x2816,64x1024x2816 (default: four)"
    add("--shapes", type=list_of(parse_shape), help=shapes)
    variants = f"of the op gemm: {', '.join(VARIANTS)} (default: all)"
    add("--variants", type=names_of(VARIANTS), help=variants)
    threads = "values of JAX_UB_NUM_THREADS to compare with the first, such as 2,16"
    add("--threads", type=list_of(positive), help=threads)
    rounds = "timed calls of each program (default: 11; with --processes "
    rounds += f"{_PROCESS_ROUNDS}, with --quick 3)"
    add("--rounds", type=positive, help=rounds)
    patience = "run up to this many times as many rounds, and keep the calmest"
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
    chosen: dict[str, Any] = {"ops": tuple(OPS)}
    if given.processes is not None:
        chosen = {"ops": processes.OPS, "rounds": _PROCESS_ROUNDS}
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
    if (reason := _why_ineffective(given, found)) is not None:
        raise UnsupportedOverlapError(f"bench: {reason}")
    if given.processes is not None:
        compared = tuple(op for op in processes.OPS if op in found.ops)
        found = dataclasses.replace(found, devices=given.processes, ops=compared)
    _check_shapes(found, "--devices" if given.processes is None else "--processes")
    return found


def _check_shapes(found, option):
    for op in found.ops:
        shapes = _FIXED_SHAPES.get(op, found.shapes)
        for shape, num_ranks in itertools.product(shapes, found.devices):
            check_divides("bench", shape, num_ranks, option)


def _why_ineffective(given, found) -> str | None:
    """Returns why an option has no effect or nothing can be measured, else None.

    `given` is the parsed command line, `found` the options with their defaults.
    """
    ops, devices, named = set(found.ops), set(found.devices), ",".join(found.ops)
    fp8 = ",".join(name for name in found.dtypes if name in cases.FP8_RECIPES)
    in_job = given.processes is not None
    leave_out = "has no effect with --processes. Leave one of them out."
    compared = ", ".join(processes.OPS)
    reasons = {
        f"--devices {leave_out}": in_job and given.devices,
        f"--platform cuda {leave_out}": in_job and given.platform == "cuda",
        f"--threads {leave_out}": in_job and given.threads,
        f"--dtypes {fp8} {leave_out}": in_job and fp8,
        "--platform cuda has no effect with --threads. Leave one of them out.": (
            given.threads and given.platform == "cuda"
        ),
        f"none of {named} is compared over processes. Take some of {compared}.": (
            in_job and ops.isdisjoint(processes.OPS)
        ),
        "a barrier is between processes. Add --processes 2.": (
            not in_job and "barrier" in ops
        ),
        "the op gemm runs on one device. Add 1 to --devices.": (
            not in_job and ops <= {"gemm"} and 1 not in devices
        ),
        "latency is between ranks. Add 2 to --devices.": (
            not in_job and ops <= {"latency"} and devices <= {1}
        ),
        f"none of {named} has FP8 operands. Take some of {', '.join(FP8_OPS)}.": (
            fp8 and ops.isdisjoint(FP8_OPS)
        ),
        "--variants are those of the op gemm. Add gemm to --ops.": (
            found.variants and "gemm" not in ops
        ),
        f"--shapes has no effect on {named}, whose sizes are fixed. Leave it out.": (
            # `processes.run_job` passes all options to the processes of a job.
            given.shapes and given.part is None and ops <= set(_FIXED_SHAPES)
        ),
    }
    return next((text for text, holds in reasons.items() if holds), None)


def command(given: argparse.Namespace) -> int:
    """Runs the benchmark of a parsed command line; returns the exit status."""
    chosen = options(given)
    settings.check()  # before any process is started
    if given.part is not None:
        processes.run_part(given.part, chosen)
    elif given.processes is not None:
        _run_processes(given, chosen)
    else:
        _run(given, chosen)
    return 0


def _run(given, chosen):
    """Benchmarks in this process, and prints each result as soon as it is measured."""
    devices.start("bench", max(chosen.devices), given.platform)
    about = report.environment()
    title = report.describe(about, f'method "{chosen.method}", {chosen.rounds} rounds')
    table = report.results_table(chosen.dtypes, chosen.ops, given.platform)
    if chosen.threads:
        table = report.THREADS
    command_line.say(given, f"{title}\n\n{table.head()}")
    dots = FastestDots()
    results: list[Result] = []

    def write(is_complete):
        more = {**about, "fastest_dots": dots.found}
        document = _document(chosen, more, results, lowering_log.fallbacks())
        command_line.write(given, document, is_complete=is_complete)

    for result in measure(chosen, dots):
        command_line.say(given, table.row(result))
        results.append(result)
        write(is_complete=False)  # an interrupted run leaves its results
    sections = report.sections(results, lowering_log.fallbacks())
    command_line.say(given, sections, end="")
    write(is_complete=True)


def _run_processes(given, chosen):
    """Runs a multi-process job for each number in `--processes`; prints all results."""
    numbers = command_line.progress("bench", given.processes)
    found = [processes.run_job(number, chosen) for number in numbers]
    about, _, _ = found[0]
    results = [result for _, results, _ in found for result in results]
    rounds = f"{chosen.rounds} rounds of the slowest process, XLA with gloo"
    title = report.describe(about, f'method "{chosen.method}", {rounds}')
    command_line.say(given, f"{title}\n\n{report.PROCESSES.head()}")
    command_line.say(given, "\n".join(map(report.PROCESSES.row, results)))
    fallbacks = list(dict.fromkeys(each for *_, every in found for each in every))
    command_line.say(given, report.sections(results, fallbacks), end="")
    command_line.write(given, _document(chosen, about, results, fallbacks))


def _document(chosen, about, results, fallbacks):
    return {
        "schema": SCHEMA,
        **about,
        "options": dataclasses.asdict(chosen),
        "results": [result.as_json() for result in results],
        "fallbacks": [dataclasses.asdict(each) for each in fallbacks],
    }


def measure(chosen: Options, dots: FastestDots) -> Iterator[Result]:
    """Builds, checks and times all benchmark cases, and yields their results."""
    sizes = [
        (op, dtype, num_ranks, shape)
        for op, dtype, num_ranks in itertools.product(
            chosen.ops, chosen.dtypes, chosen.devices
        )
        if op in (FP8_OPS if dtype in cases.FP8_RECIPES else OPS)
        for shape in (chosen.shapes[:1] if op in _FIXED_SHAPES else chosen.shapes)
    ]
    for op, dtype, num_ranks, shape in command_line.progress("bench", sizes):
        ranks = devices.Ranks(num_ranks)
        setup = Setup(ranks, dtype, chosen.method, dots, chosen.variants)
        for case in OPS[op](setup, shape):
            cases.check_agreement(case)
            candidates = _candidates(case, chosen.threads)
            # An untimed round. A program's first call compiles it and replaces a
            # donated operand by the result. That has the output sharding, so the second
            # call compiles again.
            timing.interleave(candidates, 1)
            rounds = timing.interleave(candidates, chosen.rounds, chosen.patience)
            for threads in chosen.threads or (None,):
                yield report.evaluate(case, rounds, threads)


def _candidates(case: Case, threads: Sequence[int]) -> Sequence[Any]:
    """Returns a case's programs to time, jax_ub's once for each value of --threads.

    `threads` are the values of --threads. jax_ub's program is timed with each of them,
    the other programs only with the first: some are limits that the engine measures,
    and each number is compared with the same limits. Without --threads, no number is
    set.
    """
    if not threads:
        return case.candidates
    first, *others = threads
    own = [c for c in case.candidates if c.name in (cases.OWN, f"{cases.OWN}_once")]
    return [timing.WithThreads(c.name, c, first) for c in case.candidates] + [
        timing.WithThreads(f"{c.name}@{number}", c, number)
        for number in others
        for c in own
    ]
