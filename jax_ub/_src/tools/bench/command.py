"""Times every op of jax_ub against XLA: `python -m jax_ub bench`."""

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ub._src import dtypes, lowering_log, methods
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.files import write_json
from jax_ub._src.tools.bench import (
    cases,
    devices,
    goals,
    latency_cases,
    plot,
    process_command,
    record,
    small_cases,
    table,
    thread_counts,
    workloads,
)
from jax_ub._src.tools.bench.cases import Builder, Case, Place
from jax_ub._src.tools.bench.collective_cases import forward
from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.dots import FastestDots
from jax_ub._src.tools.bench.forward_ops import FORWARD_OPS
from jax_ub._src.tools.bench.fused_cases import fused
from jax_ub._src.tools.bench.gemm_cases import (
    VARIANTS,
    dgrad_add,
    gemm,
    wgrad_accumulate,
)
from jax_ub._src.tools.bench.latency_cases import latency
from jax_ub._src.tools.bench.linear_cases import linear_backward, linear_pair
from jax_ub._src.tools.bench.results import Result, evaluate
from jax_ub._src.tools.bench.small_cases import small
from jax_ub._src.tools.bench.timing import interleave
from jax_ub._src.tools.bench.workloads import Shape
from jax_ub._src.tools.options import (
    list_of,
    names_of,
    output_path,
    picture_path,
    positive,
)

DTYPES = {name: dtypes.BY_SHORT_NAME[name] for name in ("bf16", "f32")}
OPS: dict[str, Builder] = {
    "gemm": gemm,
    **{name: functools.partial(forward, op) for name, op in FORWARD_OPS.items()},
    "linear_pair": linear_pair,
    "linear_backward": linear_backward,
    "dgrad_add": dgrad_add,
    "wgrad_accumulate": wgrad_accumulate,
    "fused": fused,
    "latency": latency,
    "small": small,
}
# Ops that ignore --shapes, with their shape by dtype.
_FIXED_SHAPES: dict[str, dict[str, Shape]] = {
    "latency": dict.fromkeys(DTYPES.values(), latency_cases.SHAPE),
    "small": small_cases.SHAPES,
}
# Format version in the JSON; incremented when a key changes its meaning.
SCHEMA = 1
_BARRIER = "barrier"
# Default rounds with --processes. Fewer than in one process, because a round takes
# longer: all processes and process 0 alone run their programs in turn.
_PROCESS_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a benchmark run: what it compares, and how often it times programs."""

    ops: tuple[str, ...] = tuple(OPS)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    dtypes: tuple[str, ...] = tuple(DTYPES.values())
    shapes: tuple[Shape, ...] = workloads.DEFAULT
    rounds: int = 11
    method: str = "auto"
    patience: int = 1
    variants: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench` to its argument parser.

    Omitted options are None; `options` replaces None with the default.
    """
    known = ", ".join(OPS)
    names = names_of({**OPS, _BARRIER: None})
    parser.add_argument("--ops", type=names, help=f"comma-separated: {known}")
    parser.add_argument(
        "--devices", type=list_of(positive), help="the P to run on, as in 1,2,4,8"
    )
    parser.add_argument("--dtypes", type=names_of(DTYPES), help="bf16,f32")
    parser.add_argument(
        "--shapes",
        type=list_of(workloads.parse_shape),
        help="global sizes MxKxN, as in 512x1024x2816,64x1024x2816",
    )
    parser.add_argument(
        "--variants",
        type=names_of(dict.fromkeys(VARIANTS)),
        help=f"of the op gemm: {', '.join(VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--threads",
        type=list_of(positive),
        help="values of JAX_UB_NUM_THREADS that are compared with the first of them, "
        "as in 2,16,64",
    )
    parser.add_argument("--rounds", type=positive, help="timed calls of each program")
    parser.add_argument(
        "--patience",
        type=positive,
        help="run up to this many times as many rounds, and keep those in which "
        "others left the machine alone",
    )
    parser.add_argument(
        "--method", default="auto", help="the method under test (default: auto)"
    )
    parser.add_argument(
        "--platform",
        default="cpu",
        choices=("cpu", "cuda"),
        help="which devices (default: cpu)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes and few rounds: does it run?"
    )
    parser.add_argument("--json", type=output_path, help="write all figures there")
    parser.add_argument("--plot", type=picture_path, help="draw a PNG (matplotlib)")
    parser.add_argument(
        "--processes",
        type=list_of(positive),
        help="compare over so many processes instead, as in 2,4, with XLA and gloo",
    )
    # Internal: specifies what a process started by this command measures.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def options(given: argparse.Namespace) -> Options:
    """Returns the options of a command line, completed with defaults.

    Raises:
        UnsupportedOverlapError: if options exclude each other.
        ShapeContractError: if a size is not divisible by the number of ranks.
    """
    chosen = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(Options)
        if getattr(given, field.name) is not None
    }
    if "dtypes" in chosen:
        chosen["dtypes"] = tuple(DTYPES[name] for name in chosen["dtypes"])
    quick = {"devices": (1, 2), "shapes": workloads.QUICK, "rounds": 3}
    found = Options(**({**quick, **chosen} if given.quick else chosen))
    methods.resolve("bench", found.method, None)
    if _BARRIER in found.ops and given.processes is None:
        raise UnsupportedOverlapError(
            "bench: a barrier is between processes. Add --processes 2."
        )
    _check_options(given, found)
    _check_shapes(found)
    return found


def _check_options(given, found):
    """Raises an error for options that exclude each other or have no effect."""
    if found.threads:
        if given.processes is not None:
            raise UnsupportedOverlapError(
                "bench: --threads has no effect with --processes: each process "
                "computes on its part of the cores. Leave one of them out."
            )
        if given.platform != "cpu":
            raise UnsupportedOverlapError(
                "bench: --threads counts the threads of the CPU engine, and --platform "
                f"is {given.platform}. Leave one of them out."
            )
        if given.plot is not None:
            raise UnsupportedOverlapError(
                "bench: --plot has no picture of --threads. Leave it out, or take "
                "--json."
            )
        if len(set(found.threads)) < len(found.threads):
            raise UnsupportedOverlapError(
                f"bench: --threads {','.join(map(str, found.threads))} names a count "
                "twice. Name each count once."
            )
    if found.variants and "gemm" not in found.ops:
        raise UnsupportedOverlapError(
            "bench: --variants are those of the op gemm, and --ops is "
            f"{','.join(found.ops)}. Add gemm to --ops, or leave --variants out."
        )
    if given.shapes is not None and set(found.ops) <= {*_FIXED_SHAPES, _BARRIER}:
        raise UnsupportedOverlapError(
            f"bench: --shapes has no effect on {', '.join(found.ops)}, whose sizes are "
            "fixed. Leave --shapes out, or add an op to --ops."
        )


def _check_shapes(found):
    shapes = list(found.shapes)
    for op in found.ops:
        fixed = _FIXED_SHAPES.get(op, {})
        shapes += [fixed[dtype] for dtype in found.dtypes if dtype in fixed]
    for shape in shapes:
        for num_ranks in found.devices:
            if not shape.divides(num_ranks):
                raise ShapeContractError(
                    f"bench: shape {shape} does not divide into {num_ranks} ranks. "
                    f"Take sizes that are multiples of {num_ranks}, or leave "
                    f"{num_ranks} out of --devices."
                )


def command(given: argparse.Namespace) -> int:
    """Runs the benchmark of a parsed command line and returns the exit status.

    Each result is printed, and written to the JSON file, as soon as it is measured.
    """
    if given.part is not None:
        return process_command.part(given.part)
    if given.processes is not None:
        return _over_processes(given)
    chosen = options(given)
    if given.plot is not None:
        plot.check(chosen.ops)
    devices.start(max(chosen.devices), given.platform)
    about = record.record()
    print(_describe(about, chosen))
    dots = FastestDots()
    results = []
    print("\n" + (table.threads_head() if chosen.threads else table.result_head()))
    for result in measure(chosen, dots):
        line = table.threads_line if chosen.threads else table.result_line
        print(line(result), flush=True)
        results.append(result)
        # Written after each result, so that an interrupted run leaves its results.
        if given.json is not None:
            found = document(about, chosen, dots, results)
            write_json(given.json, found)
    _print_rest(results, _judge(about, results))
    if given.plot is not None:
        plot.draw(results, given.plot, _describe(about, chosen))
    return 0


def _over_processes(given):
    if given.platform != "cpu":
        raise UnsupportedOverlapError(
            "bench: --processes compares with gloo, on CPUs. Leave --platform out."
        )
    if given.plot is not None:
        raise UnsupportedOverlapError(
            "bench: --plot has no picture of --processes. Leave it out, or take --json."
        )
    if given.devices is not None:
        raise UnsupportedOverlapError(
            "bench: --devices has no effect with --processes, which run one rank each. "
            "Leave one of them out."
        )
    given.devices = given.processes
    if given.rounds is None and not given.quick:
        given.rounds = _PROCESS_ROUNDS
    chosen = options(given)
    times = {"rounds": chosen.rounds, "patience": chosen.patience}
    told = process_command.options(given, chosen.dtypes, chosen.shapes, times)
    return process_command.run(given.processes, told, given.json)


def measure(chosen: Options, dots: FastestDots) -> Iterator[Result]:
    """Builds, checks and times all benchmark cases in turn, and yields the results."""
    for op in chosen.ops:
        for dtype in chosen.dtypes:
            for num_ranks in chosen.devices:
                place = Place(
                    Ranks(num_ranks), dtype, chosen.method, dots, chosen.variants
                )
                for case in _cases(op, place, chosen.shapes):
                    cases.check_agreement(case)
                    yield from _timed(case, chosen)


def _timed(case: Case, chosen: Options) -> list[Result]:
    candidates = case.candidates
    if chosen.threads:
        candidates = thread_counts.candidates(case, chosen.threads)
    with thread_counts.restored():
        # After the first call, a donated operand has the output sharding of the
        # program, so the second call compiles again.
        interleave(candidates, 1)
        rounds = interleave(candidates, chosen.rounds, chosen.patience)
    if chosen.threads:
        return thread_counts.evaluate_each(case, rounds, chosen.threads)
    return [evaluate(case, rounds)]


def document(
    about: dict[str, Any],
    chosen: Options,
    dots: FastestDots,
    results: Sequence[Result],
) -> dict[str, Any]:
    """Returns the JSON document of a run: environment, options, results, verdicts."""
    return {
        "schema": SCHEMA,
        **about,
        "options": dataclasses.asdict(chosen),
        "fastest_dots": dots.found,
        "results": [result.as_json() for result in results],
        "verdicts": [goals.as_json(verdict) for verdict in _judge(about, results)],
        "fallbacks": [dataclasses.asdict(f) for f in lowering_log.fallbacks()],
    }


def _judge(about, results):
    # The goals hold for CPUs with the default number of threads.
    if any(result.threads for result in results):
        return []
    return goals.judge(results) if about["machine"]["device_kind"] == "cpu" else []


def _cases(op: str, place: Place, shapes: Sequence[Shape]) -> Iterator[Case]:
    for shape in shapes[:1] if op in _FIXED_SHAPES else shapes:
        yield from OPS[op](place, shape)


def _print_rest(results, verdicts):
    notes = dict.fromkeys(note for result in results for note in result.case.notes)
    fallbacks = dict.fromkeys(
        f"{f.label}: {f.reason}" for f in lowering_log.fallbacks()
    )
    sections = {
        "Memory beside operands and results, each device": table.memory_table(results),
        "Goals": table.verdict_table(verdicts) if verdicts else [],
        "Missing": list(notes),
        table.DISTURBED: table.disturbed(results),
        "NOT overlapped, run as plain jax.lax": list(fallbacks),
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}\n")
            # With --threads, a case has a result per thread count, all with the same
            # lines. dict.fromkeys prints each line once.
            print("\n".join(dict.fromkeys(lines)))


def _describe(about, chosen):
    machine, versions = about["machine"], about["versions"]
    kind = machine["device_kind"]
    gpus = "" if kind == "cpu" else f"{machine['devices']} devices {kind}; "
    return (
        f"jax_ub bench, {about['date']}, commit {about['commit']}, "
        f"jax {versions['jax']}, Python {versions['python']}\n"
        f"{gpus}{machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_average']:.1f}; engine {about['engine']['isa']}, "
        f'{about["engine"]["threads"]} threads; method "{chosen.method}", '
        f"{chosen.rounds} rounds"
    )
