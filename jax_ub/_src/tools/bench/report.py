"""Figures of a timed case, and the tables and the picture that show them."""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.files import writing
from jax_ub._src.tables import (
    format_bytes,
    format_row,
    format_rule,
    format_seconds,
    format_table,
)
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.bench.timing import PEAK, Rounds, Summary, ratio, summarize
from jax_ub._src.tools.options import load_pyplot

# A benchmark case is reported as disturbed if other processes used more than this share
# of the CPU in a round.
_DISTURBED_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a benchmark case, each summarized over the timed rounds.

    Attributes:
        case: the benchmark case, without its programs.
        speedups: each peer's time divided by jax_ub's.
        shares: each limit's time divided by jax_ub's; 1 is as fast as the limit.
        elsewhere: CPU share of other processes in the worst of the kept rounds.
        over_first: jax_ub's time divided by its time with the first thread count.
    """

    case: Case
    times_us: dict[str, Summary]
    speedups: dict[str, Summary] = dataclasses.field(default_factory=dict)
    shares: dict[str, Summary] = dataclasses.field(default_factory=dict)
    elsewhere: float = 0.0
    threads: int | None = None
    over_first: Summary | None = None

    @property
    def own(self) -> Summary:
        """Returns the time of jax_ub's program in microseconds."""
        return self.times_us[cases.OWN]

    @property
    def gflops(self) -> float:
        """Returns the rate of jax_ub's program in GFLOP/s; 0 if it counts no FLOPs."""
        return self.case.flops / self.own.median / 1e3

    def as_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        case = found.pop("case")
        written = {c["name"]: c["variant"] for c in case.pop("candidates")}
        case["written"] = {name: text for name, text in written.items() if text}
        return {**case, "gflops": self.gflops, **found}


def evaluate(case: Case, rounds: Rounds) -> Result:
    seconds = _each_call(case, rounds.seconds)
    own = seconds[cases.OWN]
    bare = [dataclasses.replace(c, program=None, operands=[]) for c in case.candidates]
    return Result(
        case=dataclasses.replace(case, candidates=bare),
        times_us={
            name: summarize([1e6 * value for value in values])
            for name, values in seconds.items()
        },
        speedups={n: ratio(seconds[n], own) for n in cases.PEERS if n in seconds},
        shares=_shares(seconds),
        elsewhere=rounds.elsewhere,
    )


def evaluate_threads(case: Case, rounds: Rounds, counts: Sequence[int]) -> list[Result]:
    """Returns a result for each number of engine threads, relative to the first one.

    Times of jax_ub's programs with the other counts have names such as "jax_ub@16".
    """
    seconds = rounds.seconds
    results = []
    for count in counts:
        named = {n: s for n, s in seconds.items() if "@" not in n}
        chosen = {n: seconds.get(f"{n}@{count}", s) for n, s in named.items()}
        own, first = (_each_call(case, s)[cases.OWN] for s in (chosen, named))
        results.append(
            dataclasses.replace(
                evaluate(case, Rounds(chosen, rounds.elsewhere)),
                threads=count,
                over_first=ratio(own, first),
            )
        )
    return results


def _each_call(case, seconds):
    """Returns the seconds per call of each program, in every round.

    For a case of chained calls, it subtracts the time of a single call from the time of
    the chain and divides by the number of further calls.
    """
    if case.calls == 1:
        return seconds
    each = dict(seconds)
    for name in (cases.OWN, cases.BEST):
        more = _difference(seconds[name], seconds[f"{name}_once"])
        each[name] = [value / case.calls for value in more]
    return each


def _shares(seconds):
    own = seconds[cases.OWN]
    shares = {n: ratio(seconds[n], own) for n in cases.LIMITS if n in seconds}
    if cases.LAUNCH in seconds:
        # The plain GEMM runs on one device, where a launch takes less time than on all
        # devices. Each program's time is therefore reduced by its own launch time.
        plain = _difference(seconds[cases.PLAIN], seconds[cases.LAUNCH_ONE])
        without_launch = ratio(plain, _difference(own, seconds[cases.LAUNCH]))
        shares[cases.PLAIN_APART] = without_launch
    return shares


def _difference(seconds, base):
    # If noise makes the longer program the faster one in a round, the difference is not
    # positive. A tiny positive time keeps the quotients defined.
    return [max(more - less, 1e-9) for more, less in zip(seconds, base, strict=True)]


def _ratio_text(summary: Summary | None) -> str:
    return f"{summary.median:.2f} ±{summary.spread / 2:.0%}" if summary else ""


def _ratio_to(peer: str) -> Callable[[Result], str]:
    return lambda result: _ratio_text(result.speedups.get(peer))


def _share_of(limit: str) -> Callable[[Result], str]:
    def text(result: Result) -> str:
        share = result.shares.get(limit)
        return f"{share.median:.2f}" if share else ""

    return text


# The width of each column, and the function that returns a result's cell.
_Column = tuple[int, Callable[[Result], object]]
_COLUMNS: dict[str, _Column] = {
    "op": (29, lambda r: r.case.name),
    "P": (2, lambda r: r.case.num_ranks),
    "processes": (9, lambda r: r.case.num_processes),
    "dtype": (8, lambda r: r.case.dtype),
    "M x K x N": (14, lambda r: r.case.shape if r.case.op != "barrier" else ""),
    "threads": (7, lambda r: r.threads),
    "time": (9, lambda r: format_seconds(r.own.median / 1e6)),
    "spread": (6, lambda r: f"{r.own.spread:.0%}"),
    "GF/s": (5, lambda r: f"{r.gflops:.0f}" if r.case.flops else ""),
    "over first": (12, lambda r: _ratio_text(r.over_first)),
    **{name: (12, _ratio_to(name)) for name in cases.PEERS},
    **{name: (10, _share_of(name)) for name in (cases.PLAIN, cases.IN_PROCESS)},
    **{name: (5, _share_of(name)) for name in (cases.COPY, PEAK)},
}
_TIMES = ("time", "spread", "GF/s")


class Table:
    """A Markdown table with a row per benchmark result, printed row by row."""

    def __init__(self, *columns: str):
        self._columns = columns
        self._widths = [_COLUMNS[name][0] for name in columns]

    def head(self) -> str:
        rule = format_rule(self._widths, is_markdown=True)
        return f"{self._row(self._columns)}\n{rule}"

    def row(self, result: Result) -> str:
        return self._row([_COLUMNS[name][1](result) for name in self._columns])

    def _row(self, cells):
        return format_row(cells, self._widths, is_markdown=True)


_CASE = ("op", "P", "dtype", "M x K x N")
RESULTS = Table(*_CASE, *_TIMES, *cases.PEERS, cases.PLAIN, cases.COPY, PEAK)
THREADS = Table(
    *_CASE, "threads", "time", "spread", "over first", cases.BEST, cases.PLAIN
)
PROCESSES = Table(
    *("op", "processes", "dtype", "M x K x N"),
    *_TIMES,
    *(cases.BEST, cases.NAIVE, cases.IN_PROCESS, cases.PLAIN, PEAK),
)


def sections(results: Sequence[Result], fallbacks: Sequence[str]) -> str:
    """Returns the text below the table of results: memory, notes, disturbed cases."""
    found = {
        "Memory in addition to operands and results, per device": _memory(results),
        "Missing": [note for result in results for note in result.case.notes],
        "Disturbed by other processes": [
            f"{result.case.title}: {result.elsewhere:.0%} of the machine"
            for result in results
            if result.elsewhere > _DISTURBED_SHARE
        ],
        "NOT overlapped, run as plain jax.lax": fallbacks,
    }
    # With --threads, a case has a result per thread count, all with the same lines.
    # dict.fromkeys keeps each line once.
    return "".join(
        "\n".join([f"\n{title}\n", *dict.fromkeys(lines), ""])
        for title, lines in found.items()
        if lines
    )


def _memory(results):
    rows = [
        (
            result.case.name,
            result.case.num_ranks,
            result.case.dtype,
            result.case.shape,
            format_bytes(memory.own_bytes),
            format_bytes(memory.peer_bytes),
            format_bytes(memory.workspace_bytes),
            f"{memory.avoided}: {format_bytes(memory.avoided_bytes)}",
        )
        for result in results
        if (memory := result.case.memory) is not None
    ]
    columns = (*_CASE, "jax_ub", "xla_best", "engine", "not allocated")
    return format_table(columns, rows, is_markdown=True) if rows else []


def describe(environment: dict[str, Any], options: str) -> str:
    """Returns a title with the machine, versions and options of a benchmark run."""
    machine, versions = environment["machine"], environment["versions"]
    engine, kind = environment["engine"], machine["device_kind"]
    gpus = "" if kind == "cpu" else f"{machine['devices']} devices {kind}; "
    return (
        f"jax_ub bench, {environment['date']}, commit {environment['commit']}, "
        f"jax {versions['jax']}, Python {versions['python']}\n"
        f"{gpus}{machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_average']:.1f}; engine {engine['isa']}, {engine['threads']} "
        f"threads; {options}"
    )


_SERIES = {
    cases.BEST: ("over XLA's fastest program", "#1f77b4"),
    cases.NAIVE: ("over XLA's naive program", "#9ecae1"),
    cases.RING: ("over a ppermute ring", "#fdae6b"),
    cases.PLAIN: ("share of the plain GEMM", "#555555"),
}


def check_plot(ops: Sequence[str]) -> None:
    """Raises an error if `--plot` cannot work, before a long benchmark run starts."""
    load_pyplot("bench: --plot")
    if set(ops) <= {"latency"}:
        raise UnsupportedOverlapError(
            "bench: --plot has nothing to draw but latency. Add an op to --ops."
        )


def plot(results: Sequence[Result], path: pathlib.Path, title: str) -> None:
    """Writes a PNG of speed-ups: a panel for each dtype, bars for each op and P.

    The height of a bar is the geometric mean over shapes; each dot is one shape.
    """
    pyplot = load_pyplot("bench: --plot")
    shown = [result for result in results if result.case.op != "latency"]
    dtypes = sorted({result.case.dtype for result in shown})
    size = (14, 4.2 * len(dtypes))
    figure, panels = pyplot.subplots(len(dtypes), 1, figsize=size, squeeze=False)
    for panel, dtype in zip(panels[:, 0], dtypes, strict=True):
        _draw_bars(panel, [r for r in shown if r.case.dtype == dtype])
        panel.set_title(dtype, loc="left")
    panels[0, 0].legend(loc="upper right", ncols=len(_SERIES), fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bars(panel, results):
    groups: dict[str, list[Result]] = {}
    for result in results:
        name = result.case.name.removeprefix("gemm ").replace("_", "\n")
        label = f"{name}\nP={result.case.num_ranks}"
        groups.setdefault(label, []).append(result)
    width = 0.8 / len(_SERIES)
    for offset, (series, (label, colour)) in enumerate(_SERIES.items()):
        values = [
            [
                summary.median
                for r in group
                if (summary := r.speedups.get(series) or r.shares.get(series))
            ]
            for group in groups.values()
        ]
        x = [i + (offset - (len(_SERIES) - 1) / 2) * width for i in range(len(groups))]
        heights = [statistics.geometric_mean(v) if v else 0.0 for v in values]
        if any(heights):
            panel.bar(x, heights, width, color=colour, label=label)
        for at, group in zip(x, values, strict=True):
            panel.plot([at] * len(group), group, ".", color="black", ms=3)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(groups)), groups, fontsize=6)
    panel.set_ylabel("times as fast")
    panel.margins(x=0.01)
