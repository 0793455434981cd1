"""Matplotlib settings and colours that all plots of the library share."""

from collections.abc import Mapping
from typing import Any

from jax_ub._src.errors import UnsupportedOverlapError

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


def load_pyplot(option: str) -> Any:
    """Imports pyplot with a backend that writes files and needs no display.

    Args:
        option: the command-line option that needs it, such as "bench: --plot".

    Raises:
        UnsupportedOverlapError: if matplotlib is not installed; says how to install it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UnsupportedOverlapError(
            f"{option} draws with matplotlib, which is not installed. Install it "
            "with: pip install 'jax_ub[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


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
