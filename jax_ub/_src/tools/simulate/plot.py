"""Plots a simulation: bars for all layers, and the timeline of one layer."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ub._src.files import writing
from jax_ub._src.tools import options, pictures
from jax_ub._src.tools.simulate import plan
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.tables import LayerRow, workload_of
from jax_ub._src.tools.simulate.timeline import Timeline

_US = 1e6


def draw(
    rows: Sequence[LayerRow], shown: LayerRow, machine: Hardware, path: pathlib.Path
) -> None:
    """Writes a PNG with bars of all layers' times and the timeline of one layer.

    The timeline shows rank 0 in the layer of the row `shown`.
    """
    pyplot = options.load_pyplot("simulate: --png")
    figure, (bars, lanes) = pyplot.subplots(
        2,
        1,
        figsize=(11, 2.0 + 0.72 * len(rows) + 2.6),
        gridspec_kw={"height_ratios": [0.72 * len(rows) + 0.3, 2.2]},
    )
    _bars(bars, rows)
    workload = workload_of(shown.layer, shown.M, shown.num_ranks)
    times = plan.timeline(workload, machine, shown.plan.method, shown.plan.knobs)
    _lanes(lanes, shown, times)
    figure.suptitle(
        f"{rows[0].model} on {rows[0].num_ranks} x {machine.name}, M = {rows[0].M}, "
        "bf16, forward: simulated",
        fontsize=13,
        color=pictures.INK,
        x=0.02,
        ha="left",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    with writing(path):
        figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[LayerRow]) -> None:
    longest = max(row.bounds.serial_s for row in rows) * _US
    for place, row in enumerate(rows):
        limits = row.bounds
        first = place == 0
        axes.barh(
            place - 0.2,
            limits.library_gemm_s * _US,
            0.36,
            color=pictures.COLOURS["serial"],
            label="one after the other: GEMM" if first else None,
        )
        axes.barh(
            place - 0.2,
            limits.collective_s * _US,
            0.36,
            left=limits.library_gemm_s * _US,
            color=pictures.COLOURS["collective"],
            label="and its collective" if first else None,
        )
        axes.barh(
            place + 0.2,
            row.plan_s * _US,
            0.36,
            color=pictures.COLOURS["multiply"],
            label="overlapped" if first else None,
        )
        axes.plot(
            [limits.ideal_s * _US] * 2,
            [place - 0.02, place + 0.42],
            color=pictures.INK,
            lw=1.4,
            label="the longer of the two alone" if first else None,
        )
        axes.text(
            max(row.plan_s, limits.serial_s) * _US + 0.012 * longest,
            place,
            f"{row.speedup:.2f} x",
            va="center",
            color=pictures.INK,
            fontsize=10,
            fontweight="bold",
        )
    axes.set_yticks(
        range(len(rows)),
        [f"{row.layer.name}\n{row.layer.K} to {row.layer.N}" for row in rows],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.09)
    axes.set_xlabel("us", color=pictures.INK, loc="right", fontsize=9)
    pictures.tidy(axes)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )


def _lanes(axes: Any, row: LayerRow, times: Timeline) -> None:
    limits = row.bounds
    _in_turn(axes, row)
    names = [name for name in ("wire", "gemm", "sum", "rank") if _has(times, name)]
    end = max(times.seconds, limits.serial_s) * _US
    issued = 0
    for span in times.spans:
        place, height = 1.0 + names.index(span.lane), 0.62
        if span.lane == "gemm" and row.plan.knobs.streams > 1:
            # Kernels of several streams run at the same time.
            height /= row.plan.knobs.streams
            stream = issued % row.plan.knobs.streams
            place += (stream - (row.plan.knobs.streams - 1) / 2) * height
            issued += 1
        _box(axes, span, place, height, end)
    titles = {
        "wire": "puts of chunk",
        "gemm": "GEMM of chunk",
        "sum": "sums",
        "rank": "rank 0",
    }
    axes.set_yticks(
        range(1 + len(names)), ["in turn", *(titles[name] for name in names)]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1.02)
    axes.set_xlabel("us", color=pictures.INK, loc="right", fontsize=9)
    pictures.tidy(axes)
    axes.set_title(
        f"rank 0 in {row.layer.name}: the engine's {row.plan.method}, {row.plan.text}",
        loc="left",
        fontsize=10,
        color=pictures.INK,
    )


def _in_turn(axes, row):
    parts = [
        (row.bounds.library_gemm_s * _US, "serial"),
        (row.bounds.collective_s * _US, "collective"),
    ]
    left = 0.0
    for width, colour in parts[::-1] if row.layer.short_op == "ag" else parts:
        axes.barh(0, width, 0.62, left=left, color=pictures.COLOURS[colour], lw=0)
        left += width


def _box(axes, span, place, height, end):
    width = (span.end_s - span.start_s) * _US
    axes.barh(
        place,
        width,
        height,
        left=span.start_s * _US,
        color=pictures.COLOURS[span.kind],
        edgecolor="white",
        lw=0.8,
    )
    text = ",".join(str(chunk) for chunk in span.chunks)
    if width > 0.012 * end * len(text):
        axes.text(
            (span.start_s + span.end_s) / 2 * _US,
            place,
            text,
            ha="center",
            va="center",
            color="white",
            fontsize=8,
        )


def _has(times, lane):
    return any(span.lane == lane for span in times.spans)
