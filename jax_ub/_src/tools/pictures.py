"""Draws bar charts to image files, with matplotlib."""

import argparse
import contextlib
import importlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ub._src.errors import shown
from jax_ub._src.files import writing
from jax_ub._src.tools.options import load_extra, output_path

_SUFFIXES = (".png", ".pdf", ".svg")
_COLOURS = ("#5aa2d8", "#b5d5ea", "#fdae6b", "#777777")
_GROUP_WIDTH = 0.8


def picture_path(text: str) -> pathlib.Path:
    """Checks that a command-line option names an image file that can be written.

    The suffix selects the format: .png, .pdf or .svg.
    """
    path = output_path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} does not end in {', '.join(_SUFFIXES)}. Name an image file."
        )
    return path


def load_pyplot(option: str) -> Any:
    """Imports pyplot with a backend that writes files and needs no display."""
    load_extra("matplotlib", option).use("Agg")
    return importlib.import_module("matplotlib.pyplot")


@contextlib.contextmanager
def drawing(
    option: str, path: pathlib.Path, title: str, num_panels: int, size: tuple
) -> Iterator[Sequence[Any]]:
    """Yields panels, one below the other, and writes the file after the block."""
    pyplot = load_pyplot(option)
    figure, panels = pyplot.subplots(num_panels, 1, figsize=size, squeeze=False)
    yield panels[:, 0]
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_bars(
    panel: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]
) -> list[tuple[str, list[float], float]]:
    """Draws a group of bars per name in `groups`, with one bar of each series.

    Returns:
        For each series its name, the x of its bars' centers, and their width.
    """
    width = _GROUP_WIDTH / len(series)
    bars = []
    for index, (name, heights) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        x = [at + offset for at in range(len(groups))]
        if any(heights):
            panel.bar(x, heights, 0.95 * width, color=_COLOURS[index], label=name)
        bars.append((name, x, width))
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(groups)), groups, fontsize=7)
    panel.margins(x=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    return bars


def add_legend(panel: Any) -> None:
    """Adds a legend of one row above the panel, where it hides no bar."""
    _, labels = panel.get_legend_handles_labels()
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False}
    panel.legend(ncols=max(1, len(labels)), fontsize=8, **above)
