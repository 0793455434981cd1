"""Figures of a timed case, and the tables and the picture that show them."""

import dataclasses
import datetime
import pathlib
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_ub._src.lowering_log import Fallback
from jax_ub._src.runtime import cpu_engine, tuned_tables
from jax_ub._src.tables import (
    format_bytes,
    format_row,
    format_rule,
    format_seconds,
    format_table,
)
from jax_ub._src.tools import pictures
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.bench.linear import LINEAR_OPS
from jax_ub._src.tools.bench.peers import has_onednn
from jax_ub._src.tools.options import load_extra
from jax_ub._src.tools.timing import PEAK, Rounds, Summary, ratio, summarize

_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy")
# A benchmark case is reported as disturbed if other processes used more than this share
# of the CPU in a round. Its ratios are not valid: the programs of a round run one after
# another, each under another load.
_DISTURBED_SHARE = 0.1
_DISTURBED = (
    "Disturbed by other processes. The ratios of these cases are not valid: stop other "
    "programs, or repeat with --patience 4"
)


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
    def is_disturbed(self) -> bool:
        """Returns whether the load of other processes makes the ratios invalid."""
        return self.elsewhere > _DISTURBED_SHARE

    @property
    def gflops(self) -> float:
        """Returns the rate of jax_ub's program in GFLOP/s; 0 if it counts no FLOPs."""
        return self.case.flops / self.own.median / 1e3

    def as_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        case = found.pop("case")
        written = {c["name"]: c["variant"] for c in case.pop("candidates")}
        case["written"] = {name: text for name, text in written.items() if text}
        more = {"gflops": self.gflops, "is_disturbed": self.is_disturbed}
        return {**case, **more, **found}


def evaluate(case: Case, rounds: Rounds, threads: int | None = None) -> Result:
    """Summarizes the rounds of a case, for one thread count if several were compared.

    Times of jax_ub's programs with other counts than the first have names such as
    "jax_ub@16".
    """
    first = {name: s for name, s in rounds.seconds.items() if "@" not in name}
    counted = {n: rounds.seconds.get(f"{n}@{threads}", s) for n, s in first.items()}
    seconds, first = _each_call(case, counted), _each_call(case, first)
    own = seconds[cases.OWN]
    bare = [dataclasses.replace(c, program=None, operands=[]) for c in case.candidates]
    return Result(
        case=dataclasses.replace(case, candidates=bare),
        times_us={n: summarize(np.multiply(s, 1e6)) for n, s in seconds.items()},
        speedups={n: ratio(seconds[n], own) for n in cases.PEERS if n in seconds},
        shares={n: ratio(seconds[n], own) for n in cases.LIMITS if n in seconds},
        elsewhere=rounds.elsewhere,
        threads=threads,
        over_first=ratio(own, first[cases.OWN]) if threads else None,
    )


def _each_call(case, seconds):
    """Returns the seconds per call of each program, in every round.

    For a case of chained calls, it subtracts the time of a single call from the time of
    the chain and divides by the number of further calls.
    """
    if case.calls == 1:
        return seconds
    return seconds | {
        name: _difference(seconds[name], seconds[f"{name}_once"]) / case.calls
        for name in (cases.OWN, cases.BEST)
    }


def _difference(seconds, base):
    # If noise makes a single call slower than the chain, the difference would not be
    # positive. A tiny positive time keeps the quotients defined.
    return np.maximum(np.subtract(seconds, base), 1e-9)


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


# The ops whose cases have a value in a column, where not all have it.
_LINEAR = (*LINEAR_OPS, "small")
_GEMMS = (*_LINEAR, "gemm", "dgrad_add", "wgrad_accumulate")
_OPS_WITH = {
    "GF/s": (*_GEMMS, "fused"),
    cases.NAIVE: _GEMMS,
    cases.RING: _LINEAR,
    cases.ONEDNN: ("gemm",),
    cases.UNFUSED: ("fused",),
    cases.PALLAS: ("all_gather_matmul", "small"),
    cases.PLAIN: (*_LINEAR, "dgrad_add", "wgrad_accumulate"),
    cases.COPY: _GEMMS,
    PEAK: (*_GEMMS, "fused"),
}


def results_table(
    dtypes: Sequence[str], ops: Sequence[str], platform: str = "cpu"
) -> Table:
    """Returns the table of results, without columns that the ops cannot fill."""
    is_fp8 = [dtype in cases.FP8_RECIPES for dtype in dtypes]
    peers: tuple[str, ...] = cases.FP8_PEERS * any(is_fp8)
    if not all(is_fp8):
        on_gpus = (cases.PALLAS,) * (platform != "cpu")
        peers = cases.WIDE_PEERS + on_gpus + peers
    columns = [
        name
        for name in (*_TIMES, *peers, cases.PLAIN, cases.COPY, PEAK)
        if not set(ops).isdisjoint(_OPS_WITH.get(name, ops))
    ]
    if cases.ONEDNN in columns and not (platform == "cpu" and has_onednn()):
        columns.remove(cases.ONEDNN)
    return Table(*_CASE, *columns)


THREADS = Table(
    *_CASE, "threads", "time", "spread", "over first", cases.BEST, cases.PLAIN
)
PROCESSES = Table(
    *("op", "processes", "dtype", "M x K x N"),
    *_TIMES,
    *(cases.BEST, cases.NAIVE, cases.IN_PROCESS, cases.PLAIN, PEAK),
)


def sections(results: Sequence[Result], fallbacks: Sequence[Fallback]) -> str:
    """Returns what follows the table of results: memory, notes, disturbed cases."""
    found = {
        "Memory in addition to operands and results, per device": _memory(results),
        "Missing": [note for result in results for note in result.case.notes],
        _DISTURBED: [
            f"{result.case.title}: {result.elsewhere:.0%} of the machine"
            for result in results
            if result.is_disturbed
        ],
        "NOT overlapped, run as plain jax.lax": [
            f"{fallback.label}: {fallback.reason}" for fallback in fallbacks
        ],
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
            *(column[1](result) for column in map(_COLUMNS.__getitem__, _CASE)),
            *map(format_bytes, (m.own_bytes, m.peer_bytes)),
            "" if m.residual_bytes is None else format_bytes(m.residual_bytes),
            format_bytes(m.workspace_bytes),
            f"{m.avoided}: {format_bytes(m.avoided_bytes)}",
        )
        for result in results
        if (m := result.case.memory) is not None
    ]
    columns = (*_CASE, "jax_ub", "XLA", "residuals", "engine", "not allocated")
    return format_table(columns, rows, is_markdown=True) if rows else []


def environment() -> dict[str, Any]:
    """Returns versions, machine and engine of a benchmark run, as JSON types."""
    psutil = load_extra("psutil", "bench")
    cpu = cpu_engine.load()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: tuned_tables.version_of(name) for name in _PACKAGES},
        },
        "machine": {
            "processor": _processor(),
            "cores": len(psutil.Process().cpu_affinity()),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": psutil.getloadavg()[0],
            "system": platform.platform(),
            "devices": len(jax.devices()),
            "device_kind": jax.devices()[0].device_kind,
        },
        "engine": {"isa": cpu.isa(), "threads": cpu.num_threads()},
    }


def _commit():
    """Returns the source tree's git commit, with "-dirty" if files differ, or None."""
    here = str(pathlib.Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = dict(re.findall(r"^([^\t\n]+)\s*: (.*)$", text, re.MULTILINE))
    labels = {"model name": "", "cpu family": "cpu family ", "model": "model "}
    return ", ".join(labels[name] + found[name] for name in labels if name in found)


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
    cases.BEST: "over XLA's fastest program",
    cases.NAIVE: "over XLA's naive program",
    cases.RING: "over a ppermute ring",
    cases.PALLAS: "over JAX's Pallas kernel",
    cases.BF16: "over jax_ub in bf16",
    cases.XLA_F8: "over XLA's FP8 dot",
    cases.XLA_QDQ: "over XLA, dequantized to bf16",
    cases.PLAIN: "share of the plain GEMM",
}


def plot(results: Sequence[Result], path: pathlib.Path, title: str) -> None:
    """Writes a picture of speed-ups, with a panel per dtype and bars for each op and P.

    The height of a bar is the geometric mean over shapes; each dot is one shape.
    """
    dtypes = [*dict.fromkeys(result.case.dtype for result in results)]
    size = (14, 4.2 * len(dtypes))
    with pictures.drawing("bench: --plot", path, title, len(dtypes), size) as panels:
        for panel, dtype in zip(panels, dtypes, strict=True):
            panel.set_title(dtype, loc="left")
            panel.set_ylabel("times as fast")
            _draw(panel, [result for result in results if result.case.dtype == dtype])


def _draw(panel, results):
    # The ratios of all shapes, by label of the group of bars and by program.
    groups: dict[str, dict[str, list[float]]] = {}
    for result in results:
        name = result.case.name.removeprefix("gemm ").replace("_", "\n")
        group = groups.setdefault(f"{name}\nP={result.case.num_ranks}", {})
        for program, ratio_of in (result.speedups | result.shares).items():
            group.setdefault(program, []).append(ratio_of.median)
    every = {
        label: [group.get(program, []) for group in groups.values()]
        for program, label in _SERIES.items()
    }
    heights = {
        label: [statistics.geometric_mean(each) if each else 0.0 for each in values]
        for label, values in every.items()
        if any(values)
    }
    for label, x, _ in pictures.draw_bars(panel, list(groups), heights):
        for at, each in zip(x, every[label], strict=True):
            panel.plot([at] * len(each), each, ".", color="black", ms=3)
    pictures.add_legend(panel)
