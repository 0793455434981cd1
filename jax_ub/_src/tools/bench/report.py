"""Figures of a timed case, and the tables that show them."""

import dataclasses
import datetime
import pathlib
import platform
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ub._src.lowering_log import Fallback
from jax_ub._src.methods import resolve
from jax_ub._src.output import format_bytes, format_seconds, format_table, version_of
from jax_ub._src.runtime import cpu_engine, settings
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.command_line import load_extra
from jax_ub._src.tools.timing import Rounds, Summary, ratio, summarize

_PACKAGES = ("jax_ub", "jax", "jaxlib", "numpy")
# A benchmark case is reported as disturbed if other processes use more than this share
# of the CPU in a round, or if the times of the case have more than this spread. The
# ratios of such a case are not valid, because the programs of a round run one after
# another, and each ran under a different load.
_DISTURBED_SHARE, _DISTURBED_SPREAD = 0.1, 0.3
_DISTURBED = (
    "Disturbed: other processes used the CPU, or the times vary. The ratios of these "
    "cases are not valid: stop other programs, or repeat with --patience 4"
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a benchmark case, each summarized over the timed rounds.

    Attributes:
        case: the benchmark case, without its programs.
        speedups: each peer's time divided by jax_ub's.
        shares: each limit's time divided by jax_ub's; 1 is as fast as the limit.
        elsewhere: CPU share of other processes in the worst of the kept rounds.
    """

    case: Case
    times_us: dict[str, Summary]
    speedups: dict[str, Summary] = dataclasses.field(default_factory=dict)
    shares: dict[str, Summary] = dataclasses.field(default_factory=dict)
    elsewhere: float = 0.0

    @property
    def own(self) -> Summary:
        """Returns median, spread and minimum of jax_ub's times in microseconds."""
        return self.times_us[cases.OWN]

    @property
    def is_disturbed(self) -> bool:
        """Returns whether other processes or varying times make ratios invalid."""
        is_loaded = self.elsewhere > _DISTURBED_SHARE
        return is_loaded or self.own.spread > _DISTURBED_SPREAD

    @property
    def gflops(self) -> float:
        """Returns the GFLOP/s of jax_ub's program, or 0 if it counts no FLOPs."""
        return self.case.flops / self.own.median / 1e3

    def as_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        case = found.pop("case")
        del case["candidates"]
        more = {"gflops": self.gflops, "is_disturbed": self.is_disturbed}
        return {**case, **more, **found}


def evaluate(case: Case, rounds: Rounds) -> Result:
    """Summarizes a case's timed rounds: times, speed-ups, and shares of the limits."""
    own = rounds.seconds[cases.OWN]
    ratios = {name: ratio(s, own) for name, s in rounds.seconds.items() if s is not own}
    return Result(
        case=dataclasses.replace(case, candidates=[]),
        times_us={n: summarize(np.multiply(s, 1e6)) for n, s in rounds.seconds.items()},
        speedups={n: each for n, each in ratios.items() if n not in cases.LIMITS},
        shares={n: each for n, each in ratios.items() if n in cases.LIMITS},
        elsewhere=rounds.elsewhere,
    )


_CASE = ("op", "P", "dtype", "M x K x N")
_COLUMNS = ("op", "P", "processes", *_CASE[2:], "time", "spread", "GF/s")


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table of results, without columns that are empty for all."""
    rows = [_cells(result) for result in results]
    peers = [name for result in results for name in result.speedups]
    ordered = dict.fromkeys((*_COLUMNS, *cases.PEERS, *peers, *cases.LIMITS))
    columns = [name for name in ordered if any(row.get(name) for row in rows)]
    cells = [[row.get(name, "") for name in columns] for row in rows]
    return "\n".join(format_table(columns, cells, is_markdown=True))


def _cells(result: Result) -> dict[str, str]:
    """Returns {column: text} for the table row of a result."""
    case, own = result.case, result.own
    precision = ".0f" if result.gflops >= 10 else ".2g"
    in_job, has_operands = case.num_processes > 1, case.op != "barrier"
    return {
        "op": case.name,
        "P": "" if in_job else str(case.num_ranks),
        "processes": str(case.num_processes) if in_job else "",
        "dtype": case.dtype if has_operands else "",
        "M x K x N": str(case.shape) if has_operands else "",
        "time": format_seconds(own.median / 1e6),
        "spread": f"{own.spread:.0%}",
        "GF/s": format(result.gflops, precision) if case.flops else "",
        **{
            name: f"{each.median:.2f} ±{each.spread / 2:.0%}"
            for name, each in result.speedups.items()
        },
        **{name: f"{each.median:.2f}" for name, each in result.shares.items()},
    }


def sections(results: Sequence[Result], fallbacks: Sequence[Fallback]) -> str:
    """Returns the text after the table: memory, notes, invalid ratios, fallbacks."""
    found = {
        "Memory in addition to operands and results, per device": _memory(results),
        "Missing": [note for result in results for note in result.case.notes],
        _DISTURBED: [
            f"{result.case.title}: others used {result.elsewhere:.0%} of the machine, "
            f"spread {result.own.spread:.0%}"
            for result in results
            if result.is_disturbed
        ],
        "NOT overlapped, run as plain jax.lax": [
            f"{fallback.label}: {fallback.reason}" for fallback in fallbacks
        ],
    }
    # Lines that are the same for several cases are printed once.
    return "".join(
        "\n".join([f"\n{title}\n", *dict.fromkeys(lines), ""])
        for title, lines in found.items()
        if lines
    )


def _memory(results):
    rows = [
        (
            *map(_cells(result).__getitem__, _CASE),
            *map(format_bytes, (m.own_bytes, m.peer_bytes)),
            "" if m.residual_bytes is None else format_bytes(m.residual_bytes),
            format_bytes(m.workspace_bytes // result.case.num_ranks),
            format_bytes(m.avoided_bytes),
        )
        for result in results
        if (m := result.case.memory) is not None
    ]
    columns = (*_CASE, "jax_ub", "XLA", "residuals", "engine", "not allocated")
    return format_table(columns, rows, is_markdown=True) if rows else []


def environment() -> dict[str, Any]:
    """Returns versions, machine, and the CPU engine's ISA and threads, for JSON."""
    psutil = load_extra("psutil", "bench")
    cpu = cpu_engine.load()
    cpu_engine.configure()
    now = datetime.datetime.now(datetime.UTC)
    packages = {name: version_of(name) for name in _PACKAGES}
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "method": resolve("bench", None, settings.method()).value,
        "versions": {"python": platform.python_version(), **packages},
        "machine": {
            "processor": _processor(),
            "cores": len(psutil.Process().cpu_affinity()),
            "load_average": psutil.getloadavg()[0],
            "devices": len(jax.devices()),
            "device_kind": jax.devices()[0].device_kind,
        },
        "engine": {"isa": cpu.isa(), "threads": cpu.num_threads()},
    }


def _commit():
    """Returns the git commit of the sources, with "-dirty" if modified, or None."""
    here = str(pathlib.Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = dict(re.findall(r"^([^\t\n]+)\s*: (.*)$", text, re.MULTILINE))
    labels = {"model name": "", "cpu family": "cpu family ", "model": "model "}
    return ", ".join(labels[name] + found[name] for name in labels if name in found)


def describe(environment: dict[str, Any], rounds: int) -> str:
    """Returns a title with the machine, versions, method and rounds of a benchmark."""
    machine, versions = environment["machine"], environment["versions"]
    engine, kind = environment["engine"], machine["device_kind"]
    gpus = "" if kind == "cpu" else f"{machine['devices']} devices {kind}; "
    return (
        f"jax_ub bench, {environment['date']}, commit {environment['commit']}, "
        f"jax {versions['jax']}, Python {versions['python']}\n"
        f"{gpus}{machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load_average']:.1f}; engine {engine['isa']}, {engine['threads']} "
        f'threads; method "{environment["method"]}", {rounds} rounds'
    )
