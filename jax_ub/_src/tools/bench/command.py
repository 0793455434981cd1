"""Times every op of jax_ub against XLA's fastest programs on this machine."""

import argparse
import dataclasses
import itertools
import pathlib
from typing import Any

import jax

from jax_ub._src import lowering_log
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.runtime import settings
from jax_ub._src.scaled_array import MXFP8_BLOCK
from jax_ub._src.tools import command_line, devices
from jax_ub._src.tools.bench import cases, measure, report
from jax_ub._src.tools.bench.cases import Options
from jax_ub._src.tools.bench.gemm import VARIANTS
from jax_ub._src.tools.bench.measure import FIXED_SHAPES, FP8_OPS, JOB_OPS, OPS
from jax_ub._src.tools.bench.report import Result
from jax_ub._src.tools.command_line import Shape, list_of, names_of, positive
from jax_ub._src.tools.launch.parts import count

EXAMPLE = "bench --ops all_gather_matmul --shapes 512x1024x2816 --devices 2"
DTYPES = (*Options.dtypes, *cases.FP8_RECIPES)
# Version of the JSON format. Must be incremented when a key changes its meaning.
SCHEMA = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    some = f"some of {', '.join(OPS)} (default: all that the other options allow)"
    add("--ops", type=names_of(OPS), help=some)
    add("--devices", type=list_of(count), help="numbers of ranks P (default: 1,2,4,8)")
    some_dtypes = f"some of {', '.join(DTYPES)} (default: bf16,f32)"
    add("--dtypes", type=names_of(DTYPES), help=some_dtypes)
    four = ", ".join(map(str, Options.shapes))
    shapes = f"global sizes MxKxN, such as 512x1024x2816 (default: {four})"
    add("--shapes", type=list_of(command_line.parse_shape), help=shapes)
    variants = f"of the op gemm: {', '.join(VARIANTS['gemm'])} (default: all)"
    add("--variants", type=names_of(VARIANTS["gemm"]), help=variants)
    threads = "values of JAX_UB_NUM_THREADS to compare with the first, such as 2,16"
    add("--threads", type=list_of(positive), help=threads)
    rounds = "timed calls of each program (default: 11; with --quick 3)"
    add("--rounds", type=positive, help=rounds)
    patience = "run up to this many times as many rounds, and keep the calmest "
    patience += "(default: 1)"
    add("--patience", type=positive, help=patience)
    add("--platform", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--quick", action="store_true", help="tiny shapes and few rounds, as a check")
    command_line.add_json(parser, "all figures")
    several = "numbers of processes, such as 2,4, with one rank each; XLA uses gloo"
    add("--processes", type=list_of(count), help=several)
    # Internal option with the path for results. With --processes, the benchmark passes
    # the option to the processes that it starts.
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def options(given: argparse.Namespace) -> Options:
    """Returns the options of a command line, checked and completed with defaults."""
    in_job = given.processes is not None
    chosen: dict[str, Any] = {"ops": JOB_OPS if in_job else tuple(OPS)}
    if given.quick:
        chosen |= {"devices": (1, 2), "shapes": (Shape(32, 48, 80),), "rounds": 3}
    for field in dataclasses.fields(Options):
        value = getattr(given, field.name)
        if value is not None:
            chosen[field.name] = value
    if in_job:
        chosen["devices"] = given.processes
    found = Options(**chosen)
    unmeasured = _unmeasured(found, in_job)
    # An op without a case is an error only if --ops names the op. Without --ops, ops
    # without a case are skipped.
    named = [] if given.ops is None else unmeasured.values()
    for reason in (*_conflicts(given, found), *named):
        raise UnsupportedOverlapError(f"bench: {reason}")
    measured = tuple(op for op in found.ops if op not in unmeasured)
    found = dataclasses.replace(found, ops=measured)
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
            command_line.check_divides("bench", shape, num_ranks, option)
            if "mxfp8" in found.dtypes and op in FP8_OPS:
                _check_blocks(op, shape, num_ranks)


def _check_blocks(op, shape, num_ranks):
    """Raises an error unless MXFP8 blocks divide the sizes that the GEMMs contract."""
    least_N = MXFP8_BLOCK * num_ranks
    is_column = op in ("all_gather_matmul", "linear_pair")
    is_row = op != "all_gather_matmul"
    if (is_column and shape.K % MXFP8_BLOCK) or (is_row and shape.N % least_N):
        raise ShapeContractError(
            f"bench: {op} cannot divide shape {shape} into the blocks of mxfp8 on "
            f"{num_ranks} ranks. Take a K that is a multiple of {MXFP8_BLOCK}, and an "
            f"N that is a multiple of {least_N}."
        )


def _conflicts(given: argparse.Namespace, found: Options) -> list[str]:
    """Returns an error text for each option that has no effect with other options.

    `found` has the options with their defaults.
    """
    in_job, on_gpus = given.processes is not None, given.platform == "cuda"
    fp8 = ",".join(name for name in found.dtypes if name in cases.FP8_RECIPES)
    no_effect_with = "has no effect with {}. Leave one of them out.".format
    conflicts = {
        f"--devices {no_effect_with('--processes')}": in_job and given.devices,
        f"--platform cuda {no_effect_with('--processes')}": in_job and on_gpus,
        f"--threads {no_effect_with('--processes')}": in_job and given.threads,
        f"--dtypes {fp8} {no_effect_with('--processes')}": in_job and fp8,
        f"--platform cuda {no_effect_with('--threads')}": on_gpus and given.threads,
        "--processes 1 compares no processes. Give 2 or more.": (
            in_job and 1 in given.processes
        ),
        _without_fp8(found.ops): fp8 and set(found.ops).isdisjoint(FP8_OPS),
    }
    if found.variants:
        of = "--variants are those of the op gemm"
        conflicts[f"{of}. Add gemm to --ops."] = "gemm" not in found.ops
        conflicts[f"{of}, on one device. Add 1 to --devices."] = 1 not in found.devices
    for option, ops in (("shapes", FIXED_SHAPES), ("dtypes", ("barrier",))):
        text = f"--{option} has no effect on {', '.join(found.ops)}. Leave it out."
        # The processes of a job get all options, including defaults that the user has
        # not given. There, such an option is no error.
        is_given = given.part is None and getattr(given, option) is not None
        conflicts[text] = is_given and set(found.ops) <= set(ops)
    return [text for text, is_so in conflicts.items() if is_so]


def _without_fp8(ops):
    some = ", ".join(FP8_OPS)
    return f"none of {','.join(ops)} has FP8 operands. Take some of {some}."


def _unmeasured(found: Options, in_job: bool) -> dict[str, str]:
    """Returns the ops that these options exclude, each with the reason as text."""
    if in_job:
        alone = [op for op in found.ops if op not in JOB_OPS]
        reason = f"none of {','.join(alone)} is compared over processes. Take some of "
        return dict.fromkeys(alone, f"{reason}{', '.join(JOB_OPS)}.")
    reasons = {"barrier": "a barrier is between processes. Add --processes 2."}
    if 1 not in found.devices:
        reasons["gemm"] = "the op gemm runs on one device. Add 1 to --devices."
    if set(found.devices) <= {1}:
        reasons["latency"] = "latency is between ranks. Add 2 to --devices."
    if set(found.dtypes) <= set(cases.FP8_RECIPES):
        wide = [op for op in found.ops if op not in FP8_OPS]
        reason = f"{_without_fp8(wide)} Or add bf16 to --dtypes."
        reasons |= dict.fromkeys(wide, reason)
    return {op: reasons[op] for op in found.ops if op in reasons}


def command(given: argparse.Namespace) -> int:
    """Runs the benchmark of a parsed command line; returns the exit status."""
    chosen = options(given)
    settings.check()  # before any process is started
    if given.part is not None:
        measure.run_part(given.part, chosen)
    elif given.processes is None:
        devices.start("bench", max(chosen.devices), given.platform)
        _report(given, chosen, measure.measure(chosen))
    else:
        jax.config.update("jax_platforms", "cpu")
        _report(given, chosen, measure.run_jobs(chosen))
    return 0


def _report(given, chosen, measured):
    """Prints the table of each op as soon as it is measured, and writes the JSON."""
    about = report.environment()
    command_line.say(given, report.describe(about, chosen.rounds))
    results: list[Result] = []

    def write(is_complete):
        document = {
            "schema": SCHEMA,
            **about,
            "options": dataclasses.asdict(chosen),
            "results": [result.as_json() for result in results],
            "fallbacks": [dataclasses.asdict(f) for f in lowering_log.fallbacks()],
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
    command_line.say(given, report.sections(results, lowering_log.fallbacks()), end="")
    write(is_complete=True)
