"""Losses and times that are recorded during training, and their plot."""

import dataclasses
import pathlib

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

_COLORS = ("tab:green", "tab:blue", "tab:orange", "tab:purple")


@dataclasses.dataclass
class History:
    """Losses and times of one run.

    Attributes:
        name: name of the run.
        steps: indices of the steps, from 0.
        losses: mean loss of each step, in nats per byte.
        steps_s: time of each step in seconds; the first includes compilation.
        linear_s: times of a step's linear layers alone, measured at some steps.
    """

    name: str
    steps: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    steps_s: list[float] = dataclasses.field(default_factory=list)
    linear_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def warm_steps_s(self) -> list[float]:
        """Returns the times of all steps but the first, which compiles."""
        return self.steps_s[1:] or self.steps_s

    @property
    def final_loss(self) -> float:
        """Returns the mean loss of the last 10 steps."""
        return float(np.mean(self.losses[-10:]))

    def describe_times(self) -> str:
        """Describes the median and quartiles of a step, and the linear layers' time."""
        low, median, high = 1e3 * np.percentile(self.warm_steps_s, (25, 50, 75))
        linear = 1e3 * np.median(self.linear_s)
        return (
            f"step {median:.1f} ms ({low:.1f} to {high:.1f}), "
            f"linear layers {linear:.1f} ms"
        )


def speedup(history: History, twin: History) -> np.ndarray:
    """Returns quartiles of the speedup over the XLA run, from pairs of steps."""
    ratios = np.divide(twin.warm_steps_s, history.warm_steps_s)
    return np.percentile(ratios, (25, 50, 75))


def plot(path: pathlib.Path, histories: list[History], entropy: float) -> None:
    """Writes the plot of the runs.

    Args:
        path: path of the PNG.
        histories: history of each run, and of the XLA run if there is one.
        entropy: entropy of the byte frequencies in nats.
    """
    matplotlib.use("agg")
    *ours, xla = histories
    rows, ratios = [["losses", "times"]], (1,)
    if len(ours) > 1 and xla.name == "xla":  # the curves of losses nearly coincide
        rows, ratios = [*rows, ["differences", "times"]], (2, 1)
    figure, axes = plt.subplot_mosaic(
        rows,
        figsize=(11, 4.2 * len(ratios) ** 0.5),
        width_ratios=(3, 2),
        height_ratios=ratios,
        layout="constrained",
    )
    losses, times = axes["losses"], axes["times"]
    width = 3 if len(histories) <= 2 else 1.5
    styles = [
        ("black", "--", 1) if history.name == "xla" else (_COLORS[i], "-", width)
        for i, history in enumerate(histories)
    ]
    for history, (color, style, lw) in zip(histories, styles, strict=True):
        losses.plot(
            history.steps,
            history.losses,
            style,
            lw=lw,
            color=color,
            label=history.name,
        )
    losses.axhline(
        entropy, color="tab:red", lw=1, ls=":", label="entropy of byte frequencies"
    )
    losses.set(xlabel="step", ylabel="loss [nats per byte]", title="Training loss")
    losses.legend(loc="upper right")
    if "differences" in axes:
        for history, (color, *_) in zip(ours, styles, strict=False):
            percent = 100 * (np.divide(history.losses, xla.losses) - 1)
            axes["differences"].plot(history.steps, percent, color=color, lw=1)
        axes["differences"].axhline(0, color="black", lw=1, ls="--")
        axes["differences"].set(xlabel="step", ylabel="difference from xla [%]")

    for row, (history, (color, *_)) in enumerate(zip(histories, styles, strict=True)):
        _draw_times(times, row, history, color)
    times.set_yticks(range(len(histories)), [history.name for history in histories])
    times.invert_yaxis()
    times.set_xlim(left=0)
    times.set(xlabel="time [ms]", title="Time of a step: median and quartiles")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_times(axes, row: int, history: History, color: str) -> None:
    low, median, high = 1e3 * np.percentile(history.warm_steps_s, (25, 50, 75))
    linear = 1e3 * np.median(history.linear_s)
    spread = [[median - low], [high - median]]
    axes.barh(row, median, height=0.7, color=color, alpha=0.25, xerr=spread, capsize=6)
    axes.barh(row, linear, height=0.35, color=color, alpha=0.35)
    axes.text(0, row, f" linear layers: {linear:.0f} ms", va="center")
    axes.text(0, row + 0.18, f" step: {median:.0f} ms", va="top")
