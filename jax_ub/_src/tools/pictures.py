"""Matplotlib settings and colours that all plots of the library share."""

from collections.abc import Mapping
from typing import Any

INK = "#22303c"
GRID = "#d9dee3"
# Colours by activity of a rank. Light colours are waiting and work without overlap.
COLOURS = {
    "multiply": "#2f6fb0",
    "put": "#e0873a",
    "reduce": "#5b9e5f",
    "copy": "#8f6bb3",
    "wait": "#d7dbe0",
    "call": "#e3edf7",
    "serial": "#b8c0c8",
    "collective": "#f0c6a3",
}


def tidy(axes: Any) -> None:
    """Removes the frame of a plot except its time axis, and adds a vertical grid."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.grid(axis="x", color=GRID, lw=0.6)
    axes.set_axisbelow(True)


def legend(axes: Any, names: Mapping[str, str]) -> None:
    """Adds a legend of one line above the right end of a plot.

    Args:
        axes: the panel.
        names: the label of each activity in `COLOURS`.
    """
    from matplotlib import patches

    axes.legend(
        handles=[
            patches.Patch(color=COLOURS[kind], label=name)
            for kind, name in names.items()
        ],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.06),
        ncols=max(1, len(names)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.0,
    )
