"""Formats benchmark results as tables in Markdown."""

from collections.abc import Sequence

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.goals import Verdict
from jax_ub._src.tools.bench.results import Result
from jax_ub._src.tools.bench.statistics import Summary

_RESULT_COLUMNS = (
    ("op", 29),
    ("P", 2),
    ("dtype", 8),
    ("M x K x N", 14),
    ("time", 9),
    ("spread", 6),
    ("GF/s", 5),
    ("xla_best", 12),
    ("xla_naive", 12),
    ("xla_ring", 12),
    ("onednn", 12),
    ("unfused", 12),
    ("plain_gemm", 10),
    ("copy", 5),
    ("peak", 5),
)
_THREADS_COLUMNS = (
    ("op", 29),
    ("P", 2),
    ("dtype", 8),
    ("M x K x N", 14),
    ("threads", 7),
    ("time", 9),
    ("spread", 6),
    ("over first", 12),
    ("xla_best", 12),
    ("plain_gemm", 10),
)
_PROCESS_COLUMNS = (
    ("op", 29),
    ("processes", 9),
    ("dtype", 8),
    ("M x K x N", 14),
    ("time", 9),
    ("spread", 6),
    ("GF/s", 5),
    ("xla_best", 12),
    ("xla_naive", 12),
    ("in_process", 10),
    ("plain_gemm", 10),
    ("peak", 5),
)
_VERDICT_COLUMNS = (
    ("op", 29),
    ("P", 2),
    ("dtype", 8),
    ("figure", 31),
    ("over", 18),
    ("value", 7),
    ("limit", 7),
    ("goal", 8),
    ("", 19),
)
_MEMORY_COLUMNS = (
    ("op", 29),
    ("P", 2),
    ("dtype", 8),
    ("M x K x N", 14),
    ("jax_ub", 10),
    ("xla_best", 10),
    ("engine", 10),
    ("not allocated", 46),
)

# Title of the section with the lines that `disturbed` returns.
DISTURBED = "Disturbed by others, judge with care"
# A case is marked if the CPU share of other processes exceeded this in a round.
_DISTURBED_SHARE = 0.1


def result_head() -> str:
    """Returns the header of the table of results: column names and separator line."""
    return _head(_RESULT_COLUMNS)


def result_line(result: Result) -> str:
    """Returns a result's row: time, speed-up over each peer, share of each limit."""
    case = result.case
    speedups = [_speedup(result.speedups.get(name)) for name in cases.PEERS]
    limits = (cases.PLAIN, cases.COPY, cases.PEAK)
    return _line(
        _RESULT_COLUMNS,
        f"{case.op} {case.variant}".strip(),
        case.num_ranks,
        case.dtype,
        case.shape,
        duration(result.own.median),
        f"{result.own.spread:.0%}",
        f"{result.gflops:.0f}" if case.flops else "",
        *speedups,
        *(_share(result.shares.get(name)) for name in limits),
    )


def threads_head() -> str:
    """Returns the header of the table of thread counts, for `--threads`."""
    return _head(_THREADS_COLUMNS)


def threads_line(result: Result) -> str:
    """Returns the row of a result with one thread count, for `--threads`.

    It includes the time's ratio to the time with the first count.
    """
    case = result.case
    return _line(
        _THREADS_COLUMNS,
        f"{case.op} {case.variant}".strip(),
        case.num_ranks,
        case.dtype,
        case.shape,
        result.threads,
        duration(result.own.median),
        f"{result.own.spread:.0%}",
        _speedup(result.over_first),
        _speedup(result.speedups.get(cases.BEST)),
        _share(result.shares.get(cases.PLAIN)),
    )


def process_head() -> str:
    """Returns the header of the table of multi-process results, for `--processes`."""
    return _head(_PROCESS_COLUMNS)


def process_line(result: Result) -> str:
    """Returns a multi-process result's row: time, speed-up over XLA with gloo.

    It also shows the share of each limit, such as the plain GEMM.
    """
    case = result.case
    limits = (cases.IN_PROCESS, cases.PLAIN, cases.PEAK)
    return _line(
        _PROCESS_COLUMNS,
        f"{case.op} {case.variant}".strip(),
        case.num_processes,
        case.dtype,
        case.shape if case.flops else "",
        duration(result.own.median),
        f"{result.own.spread:.0%}",
        f"{result.gflops:.0f}" if case.flops else "",
        *(_speedup(result.speedups.get(name)) for name in (cases.BEST, cases.NAIVE)),
        *(_share(result.shares.get(name)) for name in limits),
    )


def memory_table(results: Sequence[Result]) -> list[str]:
    """Returns the table lines of the memory that programs allocate per device.

    It excludes operands and results. The list is empty if no case compares memory.
    """
    lines = [_head(_MEMORY_COLUMNS)]
    for result in results:
        case, memory = result.case, result.case.memory
        if memory is not None:
            lines.append(
                _line(
                    _MEMORY_COLUMNS,
                    f"{case.op} {case.variant}".strip(),
                    case.num_ranks,
                    case.dtype,
                    case.shape,
                    size(memory.own_bytes),
                    size(memory.peer_bytes),
                    size(memory.workspace_bytes),
                    f"{memory.avoided}: {size(memory.avoided_bytes)}",
                )
            )
    return lines if len(lines) > 1 else []


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns the lines of the table of goals: value, machine's limit, bound."""
    return [_head(_VERDICT_COLUMNS), *(_verdict_line(verdict) for verdict in verdicts)]


def disturbed(results: Sequence[Result]) -> list[str]:
    """Returns a line for each result whose rounds had much background load.

    In the worst of the kept rounds, other processes used more than 10 % of the CPU.
    """
    return [
        f"{result.case.title}: {result.elsewhere:.0%} of the machine"
        for result in results
        if result.elsewhere > _DISTURBED_SHARE
    ]


def duration(microseconds: float) -> str:
    """Formats a time with three significant digits and its unit."""
    if microseconds >= 1e3:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds:.3g} us"


def size(num_bytes: int) -> str:
    """Formats a number of bytes with its unit."""
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return (
        f"{num_bytes / (1 << 10):.1f} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} B"
    )


def _verdict_line(verdict):
    shapes = f"{verdict.num_shapes} shape{'s' if verdict.num_shapes > 1 else ''}"
    return _line(
        _VERDICT_COLUMNS,
        _op(verdict),
        verdict.num_ranks,
        verdict.dtype,
        verdict.measure,
        f"{verdict.statistic}, {shapes}",
        f"{verdict.value:.3g}",
        "" if verdict.limit is None else f"{verdict.limit:.3g}",
        f"{'<=' if verdict.at_most else '>='} {verdict.bound:g}",
        verdict.outcome,
    )


def _op(verdict):
    several = f"x{verdict.num_processes}" if verdict.num_processes > 1 else ""
    return " ".join(filter(None, (verdict.op, verdict.variant, several)))


def _speedup(summary: Summary | None) -> str:
    return f"{summary.median:.2f} ±{summary.spread / 2:.0%}" if summary else ""


def _share(summary: Summary | None) -> str:
    return f"{summary.median:.2f}" if summary else ""


def _head(columns):
    rule = "|".join("-" * (width + 2) for _, width in columns)
    return _line(columns, *(name for name, _ in columns)) + f"\n|{rule}|"


def _line(columns, *cells):
    padded = (
        f"{cell!s:<{width}}" for (_, width), cell in zip(columns, cells, strict=True)
    )
    return f"| {' | '.join(padded)} |"
