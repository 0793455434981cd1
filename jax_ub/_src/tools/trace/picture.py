"""Draws a traced call: each rank's steps, with the replayed schedule below them."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ub._src.errors import UnknownNameError
from jax_ub._src.files import writing
from jax_ub._src.tools import options, pictures
from jax_ub._src.tools.trace.replayed import replayed
from jax_ub._src.tools.trace.spans import (
    BARRIER,
    CALL,
    GATHER,
    UNIT,
    WAITS,
    Call,
    Span,
    Trace,
)

_MARKED = ("multiply", "put", "reduce", "copy")
_LEGEND = {
    "multiply": "GEMM",
    "put": "put",
    "copy": "copy",
    "reduce": "sum",
    "wait": "wait",
}
_LEGEND_OF = {UNIT: "multiply", **dict.fromkeys(WAITS, "wait")}
# Colors of GEMM work units by rank; adjacent ranks differ.
_UNITS = ("#2f6fb0", "#4f9d98", "#1d3f6e", "#7f8fd0", "#3c8dbc", "#9a7fc0")


def draw(trace: Trace, path: pathlib.Path, call: int | None = None) -> None:
    """Draws one traced call to a PNG: each rank's steps over time, and its threads.

    Below each rank is the simulated schedule with the call's median time of each step.

    Args:
        trace: the trace.
        path: the file to write.
        call: index of the call; None selects the result of `typical`.

    Raises:
        UnknownNameError: if the trace has no calls.
    """
    index = typical(trace) if call is None else call
    spans = trace.of_call(index)
    what = trace.calls[index]
    lanes = _lanes(spans)
    num_lanes = what.num_ranks + 0.55 * len(lanes)
    pyplot = options.load_pyplot("trace: --png")
    figure, axes = pyplot.subplots(figsize=(12, 1.9 + 0.62 * num_lanes))
    start = spans[0].begin_ns
    scale, unit = _unit(trace.seconds_of(index))
    _ranks(axes, [s for s in spans if s.rank >= 0 and s.kind != UNIT], start, scale)
    has_schedule = _schedule(axes, what, spans, start, scale)
    names = [f"rank {rank}" for rank in range(what.num_ranks)]
    places = [float(rank) for rank in range(what.num_ranks)]
    several = len({lane[0].process for lane in lanes}) > 1
    for number, lane in enumerate(lanes):
        place = what.num_ranks + 0.1 + 0.55 * number
        _thread(axes, lane, place, start, scale)
        names.append(f"process {lane[0].process}" if several else "at work")
        places.append(place)
    axes.set_yticks(places, names)
    axes.set_ylim(places[-1] + 0.5, -0.5)
    axes.set_xlim(0, trace.seconds_of(index) * 1e9 * scale * 1.005)
    axes.set_xlabel(unit, color=pictures.INK, loc="right", fontsize=9)
    pictures.tidy(axes)
    if any(span.rank >= 0 for lane in lanes for span in lane):
        for rank, label in enumerate(axes.get_yticklabels()[: what.num_ranks]):
            label.set(color=_UNITS[rank % len(_UNITS)], fontweight="bold")
    _head(axes, trace, index, spans, has_schedule)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    with writing(path):
        figure.savefig(path, dpi=130)
    pyplot.close(figure)


def typical(trace: Trace) -> int:
    """Returns the index of a call that represents the trace.

    It has the median time among the calls of the label with the largest total time.

    Raises:
        UnknownNameError: if the trace has no calls.
    """
    times: dict[str, list[tuple[float, int]]] = {}
    for index, call in enumerate(trace.calls):
        times.setdefault(call.label, []).append((trace.seconds_of(index), index))
    if not times:
        raise UnknownNameError(
            "trace: no call of jax_ub was recorded. Wait for the results inside the "
            "traced block, and see ub.fallbacks() for calls that ran as plain jax.lax."
        )
    longest = max(times.values(), key=lambda each: sum(seconds for seconds, _ in each))
    return sorted(longest)[len(longest) // 2][1]


def _on_thread(span: Span) -> bool:
    shared = (BARRIER, "copy", "reduce")  # steps that a process runs for all its ranks
    return span.kind == UNIT or (span.rank < 0 and span.kind in shared)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans of threads to the fewest lanes in which no spans overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(filter(_on_thread, spans), key=lambda s: s.begin_ns):
        free = (
            lane
            for lane in lanes
            if lane[0].process == span.process and lane[-1].end_ns <= span.begin_ns
        )
        lane = next(free, None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return sorted(lanes, key=lambda lane: lane[0].process)


def _unit(seconds):
    return (1e-6, "ms") if seconds >= 2e-3 else (1e-3, "us")


def _ranks(axes: Any, spans: Sequence[Span], start: int, scale: float) -> None:
    whole = max(span.end_ns for span in spans) - start
    together = not any(span.kind == "multiply" for span in spans)
    there = {s.rank: s.end_ns for s in spans if s.kind == GATHER}
    for span in spans:
        left, width = (span.begin_ns - start) * scale, span.seconds * 1e9 * scale
        if span.kind == CALL:
            axes.plot(
                [left + width] * 2,
                [span.rank - 0.32, span.rank + 0.16],
                color=pictures.INK,
                lw=1.2,
            )
            # Without steps per rank, the threads compute for all ranks together, so the
            # whole time after the arrival of the other ranks is drawn as one box.
            if together:
                begin = (there.get(span.rank, span.begin_ns) - start) * scale
                rest = left + width - begin
                _box(axes, "call", span.rank - 0.08, 0.44, begin, rest)
        elif span.kind in WAITS:
            hatch = "////" if span.kind == GATHER else None
            _box(axes, "wait", span.rank - 0.08, 0.44, left, width, hatch=hatch)
        elif span.kind in _MARKED:
            _box(axes, span.kind, span.rank - 0.08, 0.44, left, width)
            wide = span.end_ns - span.begin_ns > 0.016 * whole
            if wide and span.chunk >= 0:
                _label(axes, str(span.chunk), left + width / 2, span.rank - 0.08)


def _schedule(
    axes: Any, call: Call, spans: Sequence[Span], start: int, scale: float
) -> bool:
    timeline = replayed(call, spans)
    if timeline is None:
        return False
    # The schedule starts when the calls of all ranks have arrived.
    there = max((s.end_ns for s in spans if s.kind == GATHER), default=start)
    for span in timeline.spans:
        left = (there - start + span.start_s * 1e9) * scale
        width = (span.end_s - span.start_s) * 1e9 * scale
        kind = "wait" if span.kind.startswith("wait") else span.kind
        _box(axes, kind, span.rank + 0.27, 0.16, left, width, alpha=0.6)
    return True


def _thread(
    axes: Any, spans: Sequence[Span], place: float, start: int, scale: float
) -> None:
    for span in spans:
        left, width = (span.begin_ns - start) * scale, span.seconds * 1e9 * scale
        colour = None
        if span.kind == UNIT and span.rank >= 0:
            colour = _UNITS[span.rank % len(_UNITS)]
        kind = _LEGEND_OF.get(span.kind, span.kind)
        _box(axes, kind, place, 0.36, left, width, colour=colour)


def _box(
    axes: Any,
    kind: str,
    place: float,
    height: float,
    left: float,
    width: float,
    **style: Any,
) -> None:
    colour = style.pop("colour", None) or pictures.COLOURS[kind]
    edge = "#c3c9d0" if style.get("hatch") else "white"
    axes.barh(
        place, width, height, left=left, color=colour, edgecolor=edge, lw=0.5, **style
    )


def _label(axes: Any, text: str, x: float, y: float) -> None:
    axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8)


def _head(
    axes: Any, trace: Trace, index: int, spans: Sequence[Span], has_schedule: bool
) -> None:
    call = trace.calls[index]
    same = sum(other.label == call.label for other in trace.calls)
    waited = trace.exposed_s().get(call.label, 0.0)
    seconds = trace.seconds_of(index)
    scale, unit = _unit(seconds)
    axes.set_title(
        f"{call.label}, {call.method}, P = {call.num_ranks}\n",
        loc="left",
        fontsize=13,
        color=pictures.INK,
    )
    text = (
        f"{call.operands} a rank; this call {seconds * 1e9 * scale:.3g} {unit}; a rank "
        f"waits {waited * 1e9 * scale:.3g} {unit} on average of {same}."
    )
    if has_schedule:
        text += " Thin: the schedule, with this call's own median time of each step."
    axes.text(
        0,
        1.02,
        text,
        transform=axes.transAxes,
        fontsize=8.5,
        color=pictures.INK,
    )
    kinds = {_LEGEND_OF.get(span.kind, span.kind) for span in spans}
    names = {kind: name for kind, name in _LEGEND.items() if kind in kinds}
    pictures.legend(axes, names)
