"""Which chunks a GPU multiplies in one kernel."""

import dataclasses
from collections.abc import Sequence

from jax_ub.simulate.schedules import ALL_CHUNKS, Step
from jax_ub.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a product multiplies, or a part of that."""

    payload: str
    chunk: int
    split: int


def kernels_of(
    own: int, steps: Sequence[Step], workload: Workload, aggregate: int
) -> dict[int, list[Piece] | None]:
    """Which products each step's kernel computes; None where another one's does.

    Up to `aggregate` chunks of the peers, next to each other in the schedule, are one
    kernel. It is issued where the last of them has come (a gather), or with the first
    (partial sums, which are sent when it is done). The own chunk is a kernel of its
    own.
    """
    kernels: dict[int, list[Piece] | None] = {}
    group: list[int] = []

    def close():
        if group:
            at = group[-1] if workload.gathers else group[0]
            kernels.update(dict.fromkeys(group))
            kernels[at] = [piece for index in group for piece in _pieces(steps[index])]
            group.clear()

    for index, step in enumerate(steps):
        if step.kind != "multiply":
            continue
        if step.chunk in (own, ALL_CHUNKS):
            close()
            kernels[index] = _pieces(step)
            continue
        if group and steps[group[0]].split != step.split:
            close()
        group.append(index)
        if len(group) == aggregate:
            close()
    close()
    return kernels


def _pieces(step):
    chunks = range(step.chunk, step.chunk + step.num_chunks)
    return [Piece(step.payload, chunk, step.split) for chunk in chunks]
