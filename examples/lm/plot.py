"""The picture at the end: loss curves on top of each other, and the time of a step."""

import pathlib

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from lm.history import History

_COLORS = ("tab:green", "tab:gray")


def plot(path: pathlib.Path, histories: list[History], entropy: float) -> None:
    """Writes the picture of one or two runs.

    Args:
        path: of the PNG.
        histories: the run, and its twin if it had one.
        entropy: of the byte frequencies, in nats.
    """
    matplotlib.use("agg")
    figure, (losses, times) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained"
    )
    for history, color, style in zip(histories, _COLORS, ("-", "--"), strict=False):
        losses.plot(
            history.steps, history.losses, style, color=color, label=history.name
        )
    losses.axhline(entropy, color="tab:red", lw=1, ls=":")
    losses.text(
        1.0,
        entropy,
        "entropy of byte frequencies ",
        color="tab:red",
        ha="right",
        va="bottom",
        transform=losses.get_yaxis_transform(),
    )
    losses.set(xlabel="step", ylabel="loss [nats per byte]", title="Training loss")
    losses.set_ylim(top=2 * entropy)
    losses.legend(loc="lower left")

    for row, (history, color) in enumerate(zip(histories, _COLORS, strict=False)):
        _draw_times(times, row, history, color)
    times.set_yticks(range(len(histories)), [history.name for history in histories])
    times.invert_yaxis()
    times.set_xlim(left=0)
    times.set(xlabel="time [ms]", title="Time of a step: median and quartiles")
    times.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_times(axes, row: int, history: History, color: str) -> None:
    low, median, high = 1e3 * np.percentile(history.warm_steps_s, (25, 50, 75))
    axes.barh(
        row,
        median,
        height=0.5,
        color=color,
        alpha=0.5,
        xerr=[[median - low], [high - median]],
        capsize=6,
    )
    linear = 1e3 * np.median(history.linear_s)
    label = "of that, the linear layers" if row == 0 else None
    axes.barh(row, linear, height=0.25, color=color, label=label)
    axes.annotate(
        f" {median:.0f} ms",
        (0, row),
        va="top",
        xytext=(4, -20),
        textcoords="offset points",
    )
