"""Losses and times that are recorded during training."""

import dataclasses

import numpy as np


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
