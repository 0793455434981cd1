"""Result of a simulation: the start and end of every step on every rank."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Span:
    """A simulated step of a rank, with times in seconds since the start of the call.

    `lane` is the resource that runs it: "gemm", "wire" or "sum" on a GPU. On a host, it
    is "rank", and waits are spans, too. `chunks` are the chunks that a kernel
    multiplies.
    """

    rank: int
    lane: str
    kind: str
    chunks: tuple[int, ...]
    split: int
    peer: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The simulated steps of all ranks in one call, with their times."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Returns the time of the call, until the last rank has finished."""
        return max((span.end_s for span in self.spans), default=0.0)
