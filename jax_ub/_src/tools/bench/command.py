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
    latency,
    machine,
    processes,
    report,
    timing,
)
from jax_ub._src.tools.bench.cases import Builder, Case, Setup, Shape
from jax_ub._src.tools.bench.fused import fused
from jax_ub._src.tools.bench.gemm import VARIANTS, dgrad_add, gemm, wgrad_accumulate
from jax_ub._src.tools.bench.linear import LINEAR_OPS, SMALL_SHAPES, linear, small
from jax_ub._src.tools.bench.peers import FastestDots
from jax_ub._src.tools.bench.report import Result
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
    **{name: functools.partial(linear, op) for name, op in LINEAR_OPS.items()},
    "dgrad_add": dgrad_add,
    "wgrad_accumulate": wgrad_accumulate,
    "fused": fused,
    "latency": latency.latency,
    "small": small,
}
# The ops that ignore --shapes, with their fixed shape for each dtype.
_FIXED_SHAPES: dict[str, dict[str, Shape]] = {
    "latency": dict.fromkeys(DTYPES.values(), latency.SHAPE),
    "small": SMALL_SHAPES,
}
# Format version in the JSON; incremented when a key changes its meaning.
SCHEMA = 1
_BARRIER = "barrier"
# The default number of rounds with --processes. It is smaller than in one process,
# because a round takes longer: all processes and process 0 alone run their programs in
# turn.
_PROCESS_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a benchmark run, such as ops, shapes and number of rounds."""

    ops: tuple[str, ...] = tuple(OPS)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    dtypes: tuple[str, ...] = tuple(DTYPES.values())
    shapes: tuple[Shape, ...] = cases.DEFAULT_SHAPES
    rounds: int = 11
    method: str = "auto"
    patience: int = 1
    variants: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    known = ", ".join(OPS)
    add("--ops", type=names_of([*OPS, _BARRIER]), help=f"comma-separated: {known}")
    add("--devices", type=list_of(positive), help="numbers of ranks P, as in 1,2,4,8")
    add("--dtypes", type=names_of(DTYPES), help="bf16,f32")
    add(
        "--shapes",
        type=list_of(cases.parse_shape),
        help="global sizes MxKxN, as in 512x1024x2816,64x1024x2816",
    )
    add(
        "--variants",
        type=names_of(VARIANTS),
        help=f"of the op gemm: {', '.join(VARIANTS)} (default: all)",
    )
    add(
        "--threads",
        type=list_of(positive),
        help="values of JAX_UB_NUM_THREADS that are compared with the first of them, "
        "as in 2,16,64",
    )
    add("--rounds", type=positive, help="timed calls of each program")
    add(
        "--patience",
        type=positive,
        help="run up to this many times as many rounds, and keep those with the least "
        "load by other processes",
    )
    add("--method", default="auto", help="the method under test (default: auto)")
    add(
        "--platform",
        default="cpu",
        choices=("cpu", "cuda"),
        help="platform of the devices (default: cpu)",
    )
    add("--quick", action="store_true", help="tiny shapes and few rounds, as a check")
    add("--json", type=output_path, help="write all figures to this file")
    add("--plot", type=picture_path, help="write a PNG to this file (matplotlib)")
    add(
        "--processes",
        type=list_of(positive),
        help="run one rank in each of so many processes, as in 2,4; XLA uses gloo",
    )
    # An internal option: tells a process that this command has started what to measure.
    add("--part", help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def options(given: argparse.Namespace) -> Options:
    """Checks the parsed command line, and completes it with default values."""
    chosen = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(Options)
        if getattr(given, field.name) is not None
    }
    if "dtypes" in chosen:
        chosen["dtypes"] = tuple(DTYPES[name] for name in chosen["dtypes"])
    if given.processes is not None:
        chosen["devices"] = given.processes
        chosen.setdefault("rounds", _PROCESS_ROUNDS)
    if given.quick:
        quick = {"devices": (1, 2), "shapes": cases.QUICK_SHAPES, "rounds": 3}
        chosen = {**quick, **chosen}
    found = Options(**chosen)
    methods.resolve("bench", found.method, None)
    for error in _conflicts(given, found):
        raise UnsupportedOverlapError(f"bench: {error}")
    _check_shapes(found)
    return found


def _conflicts(given, found) -> Iterator[str]:
    """Yields an error message for each pair of options that exclude each other."""
    ops, counts = ",".join(found.ops), ",".join(map(str, found.threads))
    is_fixed = set(found.ops) <= {*_FIXED_SHAPES, _BARRIER}
    if given.processes is not None:
        yield from _conflicts_of_processes(given, ops)
    elif _BARRIER in found.ops:
        yield "a barrier is between processes. Add --processes 2."
    if counts and given.platform != "cpu":
        yield (
            "--threads counts the threads of the CPU engine, and --platform is "
            f"{given.platform}. Leave one of them out."
        )
    if counts and given.plot:
        yield "--plot has no picture of --threads. Leave it out, or take --json."
    if len(set(found.threads)) < len(found.threads):
        yield f"--threads {counts} names a count twice. Name each count once."
    if found.variants and "gemm" not in found.ops:
        yield (
            f"--variants are those of the op gemm, and --ops is {ops}. Add gemm to "
            "--ops, or leave --variants out."
        )
    if given.shapes and is_fixed:
        yield (
            f"--shapes has no effect on {ops}, whose sizes are fixed. Leave --shapes "
            "out, or add an op to --ops."
        )


def _conflicts_of_processes(given, ops):
    if given.platform != "cpu":
        yield "--processes compares with gloo, on CPUs. Leave --platform out."
    if given.plot:
        yield "--plot has no picture of --processes. Leave it out, or take --json."
    if given.devices:
        yield (
            "--devices has no effect with --processes, which run one rank each. Leave "
            "one of them out."
        )
    if given.threads:
        yield (
            "--threads has no effect with --processes: each process computes on its "
            "part of the cores. Leave one of them out."
        )
    if given.ops and not set(given.ops) & set(processes.OPS):
        yield (
            f"none of {ops} is compared over processes. Take some of "
            f"{', '.join(processes.OPS)}."
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
    """Runs the benchmark of a parsed command line and returns the exit status, 0."""
    if given.part is not None:
        return processes.run_part(given.part)
    chosen = options(given)
    if given.processes is not None:
        _run_processes(given, chosen)
    else:
        _run(given, chosen)
    return 0


def _run(given, chosen):
    """Benchmarks in this process, and prints each result as soon as it is measured."""
    if given.plot is not None:
        report.check_plot(chosen.ops)
    machine.start(max(chosen.devices), given.platform)
    about = machine.environment()
    title = report.describe(about, f'method "{chosen.method}", {chosen.rounds} rounds')
    table = report.THREADS if chosen.threads else report.RESULTS
    print(f"{title}\n\n{table.head()}")
    dots = FastestDots()
    results = []
    for result in measure(chosen, dots):
        print(table.row(result), flush=True)
        results.append(result)
        # The file is written after each result, so that an interrupted run leaves its
        # results.
        if given.json is not None:
            more = {"options": dataclasses.asdict(chosen), "fastest_dots": dots.found}
            _write(given.json, {**about, **more}, results, lowering_log.fallbacks())
    fallbacks = [f"{f.label}: {f.reason}" for f in lowering_log.fallbacks()]
    print(report.sections(results, fallbacks), end="")
    if given.plot is not None:
        report.plot(results, given.plot, title)


def _run_processes(given, chosen):
    """Runs a multi-process job for each number in `--processes`, and prints results."""
    job_options = processes.JobOptions(
        ops=[op for op in processes.OPS if given.ops is None or op in given.ops],
        dtypes=chosen.dtypes,
        shapes=[dataclasses.astuple(shape) for shape in chosen.shapes],
        rounds=chosen.rounds,
        patience=chosen.patience,
        method=chosen.method,
    )
    found = [processes.run_job(number, job_options) for number in given.processes]
    about = found[0].environment
    results = [result for one in found for result in one.results]
    rounds = f"{chosen.rounds} rounds of the slowest process, XLA with gloo"
    print(report.describe(about, f'method "{chosen.method}", {rounds}') + "\n")
    print(report.PROCESSES.head())
    print("\n".join(map(report.PROCESSES.row, results)))
    fallbacks = list(dict.fromkeys(text for one in found for text in one.fallbacks))
    print(report.sections(results, fallbacks), end="")
    if given.json is not None:
        more = {"options": dataclasses.asdict(job_options)}
        _write(given.json, {**about, **more}, results, fallbacks)


def _write(path, about, results, fallbacks):
    found = {
        "schema": SCHEMA,
        **about,
        "results": [result.as_json() for result in results],
        "fallbacks": [
            one if isinstance(one, str) else dataclasses.asdict(one)
            for one in fallbacks
        ],
    }
    write_json(path, found)


def measure(chosen: Options, dots: FastestDots) -> Iterator[Result]:
    """Builds, checks and times all benchmark cases, and yields their results."""
    for op in chosen.ops:
        shapes = chosen.shapes[:1] if op in _FIXED_SHAPES else chosen.shapes
        for dtype in chosen.dtypes:
            for num_ranks in chosen.devices:
                ranks = machine.Ranks(num_ranks)
                setup = Setup(ranks, dtype, chosen.method, dots, chosen.variants)
                for shape in shapes:
                    for case in OPS[op](setup, shape):
                        cases.check_agreement(case)
                        yield from _time(case, chosen)


def _time(case: Case, chosen: Options) -> list[Result]:
    candidates = case.candidates
    if chosen.threads:
        candidates = _candidates_by_threads(case, chosen.threads)
    with timing.restored_threads():
        # After the first call, a donated operand has the output sharding of the
        # program, so the second call compiles again.
        timing.interleave(candidates, 1)
        rounds = timing.interleave(candidates, chosen.rounds, chosen.patience)
    if chosen.threads:
        return report.evaluate_threads(case, rounds, chosen.threads)
    return [report.evaluate(case, rounds)]


def _candidates_by_threads(case: Case, counts: Sequence[int]) -> list[Any]:
    """Copies jax_ub's programs in a case once for each number of threads.

    The other candidates run with the first number of threads. They include limits that
    the engine computes, which must stay comparable between the numbers of threads.
    """
    first, *others = counts
    own = (cases.OWN, f"{cases.OWN}_once")
    return [dataclasses.replace(c, threads=first) for c in case.candidates] + [
        dataclasses.replace(c, name=f"{c.name}@{count}", threads=count)
        for count in others
        for c in case.candidates
        if c.name in own
    ]
