"""Plots a benchmark run: speed-up over XLA and share of the plain GEMM's speed."""

import pathlib
from collections.abc import Sequence

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.files import writing
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.results import Result
from jax_ub._src.tools.bench.statistics import geomean
from jax_ub._src.tools.options import load_pyplot

_SERIES = {
    cases.BEST: ("over XLA, fastest way", "#1f77b4"),
    cases.NAIVE: ("over XLA, as people write it", "#9ecae1"),
    cases.RING: ("over a ppermute ring", "#fdae6b"),
    cases.PLAIN: ("share of the plain GEMM", "#555555"),
}


def check(ops: Sequence[str]) -> None:
    """Checks that a plot can be drawn, before a long benchmark run is started.

    Raises:
        UnsupportedOverlapError: if no chosen op is plotted or matplotlib is missing.
    """
    load_pyplot("bench: --plot")
    if set(ops) <= {"latency"}:
        raise UnsupportedOverlapError(
            "bench: --plot has nothing to draw but latency. Add an op to --ops."
        )


def draw(results: Sequence[Result], path: pathlib.Path, title: str) -> None:
    """Writes a PNG of speed-ups, with a panel per dtype and bars for each op and P.

    The height of a bar is the geometric mean over shapes; each dot is one shape.
    """
    pyplot = load_pyplot("bench: --plot")
    shown = [result for result in results if result.case.op != "latency"]
    dtypes = sorted({result.case.dtype for result in shown})
    figure, panels = pyplot.subplots(
        len(dtypes), 1, figsize=(14, 4.2 * len(dtypes)), squeeze=False
    )
    for panel, dtype in zip(panels[:, 0], dtypes, strict=True):
        _panel(panel, [r for r in shown if r.case.dtype == dtype])
        panel.set_title(dtype, loc="left")
    panels[0, 0].legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_SERIES), fontsize=8
    )
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel, results):
    groups: dict[str, list[Result]] = {}
    for result in results:
        case = result.case
        name = case.variant if case.op == "gemm" else case.op.replace("_", "\n")
        if case.op == "small":
            name += "\n" + case.variant.replace("_", "\n")
        groups.setdefault(f"{name}\nP={case.num_ranks}", []).append(result)
    width = 0.8 / len(_SERIES)
    for place, (series, (label, colour)) in enumerate(_SERIES.items()):
        for at, group in enumerate(groups.values()):
            values = [value for r in group if (value := _value(r, series))]
            if values:
                x = at + (place - (len(_SERIES) - 1) / 2) * width
                named = label if at == _first(groups, series) else None
                panel.bar(x, geomean(values), width, color=colour, label=named)
                panel.plot([x] * len(values), values, ".", color="black", ms=3)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(groups)), groups, fontsize=6)
    panel.set_ylabel("times as fast")
    panel.margins(x=0.01)


def _value(result, series):
    summary = result.speedups.get(series) or result.shares.get(series)
    return summary.median if summary else None


def _first(groups, series):
    with_series = (
        at
        for at, group in enumerate(groups.values())
        if any(_value(r, series) for r in group)
    )
    return next(with_series, None)
