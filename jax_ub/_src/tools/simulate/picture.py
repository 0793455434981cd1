"""Draws the predicted gain of overlap, per layer and tensor-parallel size."""

import pathlib
from collections.abc import Mapping, Sequence

from jax_ub._src.files import writing
from jax_ub._src.tools.options import load_pyplot

_COLOURS = ("#6baed6", "#3182bd", "#1f5582")
_INK = "#22303c"


def draw(
    bars: Mapping[str, Sequence[tuple[str, float, float]]],
    title: str,
    path: pathlib.Path,
) -> None:
    """Writes a PNG of predicted speed-ups, with a group of bars for each linear layer.

    Args:
        bars: for each series, the layers, their speed-ups over a GEMM followed by a
            collective, and the limits of these speed-ups.
        title: title of the picture.
        path: the file to write.
    """
    pyplot = load_pyplot("simulate: --png")
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    width = 0.8 / len(bars)
    for i, (series, layers) in enumerate(bars.items()):
        names, heights, limits = zip(*layers, strict=True)
        x = [k + (i - (len(bars) - 1) / 2) * width for k in range(len(names))]
        axes.bar(x, heights, 0.9 * width, color=_COLOURS[i], label=series)
        left, right = ([at + side * width * 0.45 for at in x] for side in (-1, 1))
        label = "perfect overlap" if i == len(bars) - 1 else None
        axes.hlines(limits, left, right, color=_INK, lw=1.4, label=label)
        for at, height in zip(x, heights, strict=True):
            text = f"{height:.2f}"
            axes.text(at, 0.04, text, ha="center", color="white", fontweight="bold")
    axes.axhline(1, color=_INK, lw=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speed-up over GEMM, then collective")
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.legend(frameon=False, ncols=2, loc="upper right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
