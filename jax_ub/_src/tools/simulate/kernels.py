"""Groups the chunks of a schedule that a GPU multiplies in one GEMM kernel."""

import dataclasses
from collections.abc import Sequence

from jax_ub._src.tools.simulate.schedules import ALL_CHUNKS, Step
from jax_ub._src.tools.simulate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a GEMM kernel's rows: one split of the rows of one rank (a chunk).

    `payload` is what was communicated before, such as "operand".
    """

    payload: str
    chunk: int
    split: int


def kernels_of(
    own: int, steps: Sequence[Step], workload: Workload, aggregate: int
) -> dict[int, list[Piece] | None]:
    """Returns the rows that each step's GEMM kernel multiplies, by index of the step.

    Up to `aggregate` consecutive chunks of peers are multiplied by one kernel; the
    rank's own chunk has a separate kernel. If operands are gathered, the kernel is
    launched at the last of its chunks, when all have arrived. If partial sums are sent,
    it is launched at the first chunk, and the sums are sent when it has finished. The
    value is None for other steps of such a group.
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
