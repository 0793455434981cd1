"""What was measured while a model was trained."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class History:
    """Losses and times of one run.

    Attributes:
        name: of the run.
        steps: the numbers of the steps, from 0.
        losses: the mean loss of each step, in nats per byte.
        steps_s: the time of each step in seconds; the first includes compilation.
        linear_s: the time of a step's linear layers alone, measured now and then.
    """

    name: str
    steps: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    steps_s: list[float] = dataclasses.field(default_factory=list)
    linear_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def warm_steps_s(self) -> list[float]:
        """The times of steps without compilation, where there are any."""
        return self.steps_s[1:] or self.steps_s

    def describe_times(self) -> str:
        """The step's median and quartiles, and the linear layers' share."""
        low, median, high = 1e3 * np.percentile(self.warm_steps_s, (25, 50, 75))
        linear = 1e3 * np.median(self.linear_s)
        return (
            f"step {median:.1f} ms ({low:.1f} to {high:.1f}), "
            f"linear layers {linear:.1f} ms"
        )


def speedup(history: History, twin: History) -> np.ndarray:
    """How many times as fast as its twin: quartiles over pairs of steps."""
    ratios = np.divide(twin.warm_steps_s, history.warm_steps_s)
    return np.percentile(ratios, (25, 50, 75))
