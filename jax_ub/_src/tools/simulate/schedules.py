"""Loads the engine's schedules, and changes the order of their steps for GPUs.

A schedule is the list of steps that a rank runs in an overlapped call.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

from jax_ub._src.runtime import cpu_engine

ALL_CHUNKS = -1


class Step(Protocol):
    """One step of a rank's schedule, such as to multiply a chunk or send it to a peer.

    `jax_ub._cpu` returns objects of this interface. `kind` is the action, such as
    "multiply", "put", "wait" or "reduce". `payload` is what it transfers: "operand",
    "partial" or "sum".
    """

    @property
    def kind(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def split(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...


@functools.lru_cache(maxsize=1024)
def steps_of(
    op: str,
    method: str,
    rank: int,
    num_ranks: int,
    num_splits: int,
    variant: str = "plain",
) -> tuple[Step, ...]:
    """Returns one rank's steps in the engine's schedule of an op and method."""
    schedule = cpu_engine.load().schedule
    return tuple(schedule(op, method, rank, num_ranks, num_splits, variant))


def every_rank(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[tuple[Step, ...]]:
    """Returns the steps of the engine's schedule for all ranks, indexed by rank."""
    return [
        steps_of(op, method, rank, num_ranks, num_splits, variant)
        for rank in range(num_ranks)
    ]


def first_rank(
    op: str, method: str, num_ranks: int, num_splits: int, variant: str = "plain"
) -> list[tuple[Step, ...]]:
    """Returns a list with the steps of rank 0 only, which represents all ranks."""
    return [steps_of(op, method, 0, num_ranks, num_splits, variant)]


def sums_at_once(steps: Sequence[Step]) -> list[Step]:
    """Reorders a schedule's steps, so that each sum is sent right after it is computed.

    The engine's schedule sends all sums at the end, because a rank that runs one step
    at a time gains nothing from the other order. With a copy engine, the sums of one
    block are sent while the next block is multiplied.
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
