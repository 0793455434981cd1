"""What a replay finds: when every rank took every step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Span:
    """When a rank took a step, in seconds from the begin of the call.

    `lane` is "gemm", "wire" or "sum" on a GPU, and "rank" on a host, where a "wait" is
    a span as well. `chunks` names what a kernel multiplies.
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
    """All ranks' spans."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last rank was done."""
        return max((span.end_s for span in self.spans), default=0.0)
