"""Draws the picture of `simulate --plot`, with matplotlib."""

import argparse
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ub._src.errors import shown
from jax_ub._src.files import writing
from jax_ub._src.tools.options import load_extra, output_path

_SUFFIXES = (".png", ".pdf", ".svg")
_COLORS = ("#5aa2d8", "#b5d5ea", "#fdae6b")
_GROUP_WIDTH = 0.8


def picture_path(text: str) -> pathlib.Path:
    """Parses the path of an image file that can be written; an argparse `type`."""
    path = output_path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} does not end in {', '.join(_SUFFIXES)}. Name an image file."
        )
    return path


def load_pyplot() -> Any:
    """Imports pyplot with a backend that writes files and needs no display."""
    load_extra("matplotlib", "simulate: --plot").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: pathlib.Path
) -> None:
    """Draws a group of bars for each layer, with a bar of each series in `rows`."""
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 3.6))
    layers = [row["layer"] for row in next(iter(rows.values()))]
    width = _GROUP_WIDTH / len(rows)
    for index, (name, series) in enumerate(rows.items()):
        x = np.arange(len(layers)) + (index - (len(rows) - 1) / 2) * width
        speedups, limits = (
            [row[key] for row in series] for key in ("speedup", "limit")
        )
        panel.bar(x, speedups, 0.95 * width, color=_COLORS[index], label=name)
        label = "perfect overlap" if index == len(rows) - 1 else None
        ends = x - width / 2, x + width / 2
        panel.hlines(limits, *ends, color="black", lw=1.4, label=label)
        for at, speedup in zip(x, speedups, strict=True):
            panel.text(at, 0.04, f"{speedup:.2f}", ha="center", fontsize=8)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(layers)), layers, fontsize=7)
    panel.margins(x=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False}
    panel.legend(ncols=len(rows) + 1, fontsize=8, **above)
    panel.set_ylabel("speed-up over GEMM, then collective")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
