"""The engine's own schedules, and what a plan may change about the order of steps."""

import functools
from collections.abc import Sequence
from typing import Protocol

from jax_ub.runtime import engine

ALL_CHUNKS = -1


class Step(Protocol):
    """A step as `jax_ub._cpu` shows it."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def payload(self) -> str: ...  # noqa: D102
    @property
    def chunk(self) -> int: ...  # noqa: D102
    @property
    def split(self) -> int: ...  # noqa: D102
    @property
    def peer(self) -> int: ...  # noqa: D102
    @property
    def slot(self) -> int: ...  # noqa: D102
    @property
    def num_chunks(self) -> int: ...  # noqa: D102


@functools.lru_cache(maxsize=1024)
def steps_of(
    op: str,
    method: str,
    rank: int,
    num_ranks: int,
    num_splits: int,
    variant: str = "plain",
) -> tuple[Step, ...]:
    """What a rank does, as the engine would do it."""
    schedule = engine.load().schedule
    return tuple(schedule(op, method, rank, num_ranks, num_splits, variant))


def every_rank(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[tuple[Step, ...]]:
    """What all ranks do."""
    return [
        steps_of(op, method, rank, num_ranks, num_splits, variant)
        for rank in range(num_ranks)
    ]


def first_rank(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[tuple[Step, ...]]:
    """What rank 0 does, where it stands for all."""
    return [steps_of(op, method, 0, num_ranks, num_splits, variant)]


def sums_at_once(steps: Sequence[Step]) -> list[Step]:
    """Puts each sum on the wire when it is made, not when all sums are.

    A rank that does one step at a time gains nothing by it, one with a copy engine of
    its own does: the sums of one block travel while the next one is multiplied.
    """
    sums = [step for step in steps if step.kind == "put" and step.payload == "sum"]
    own = [step for step in sums if step.chunk == _owner(sums)]
    moved: list[Step] = []
    for step in steps:
        if any(step is one for one in own):
            continue
        moved.append(step)
        if step.kind == "reduce":
            moved += [one for one in own if one.split == step.split]
    return moved


def _owner(sums):
    return sums[0].chunk if sums else None
