"""Groups the chunks that a GPU multiplies in one kernel."""

import dataclasses
from collections.abc import Sequence

from jax_ub.simulate.schedules import ALL_CHUNKS, Step
from jax_ub.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Piece:
    """One split of a chunk that a product multiplies."""

    payload: str
    chunk: int
    split: int


def kernels_of(
    own: int, steps: Sequence[Step], workload: Workload, aggregate: int
) -> dict[int, list[Piece] | None]:
    """Returns the products that each step's kernel computes, by the step's index.

    Up to `aggregate` consecutive chunks of peers form one kernel; the rank's own chunk
    is a separate kernel. A gather launches the kernel at the last of its chunks, which
    has to arrive first. For partial sums, the kernel is launched at the first of them,
    and they are sent when it has finished. The value of the other steps is None.
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
