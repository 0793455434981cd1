"""Times all method choices of a tuning case in interleaved rounds."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from jax_ub._src.config.tuned_file import COLUMN_GRADIENTS, TunedKey
from jax_ub._src.errors import UbError
from jax_ub._src.methods import MethodChoice
from jax_ub._src.tools.bench.cases import Shape
from jax_ub._src.tools.bench.timing import Candidate, interleave
from jax_ub._src.tools.tune.programs import Operands


@dataclasses.dataclass(frozen=True)
class Timed:
    """A method choice that was timed, and its median time per call in microseconds."""

    choice: MethodChoice
    us: float  # median over the rounds, including dispatch


def cases(
    shape: Shape, num_ranks: int, dtype: str, is_cuda: bool
) -> Iterator[TunedKey]:
    """Yields the cases to tune for a column linear layer and the row layer after it.

    A case is an op with its global sizes, P and dtype. The gradients have the same
    sizes: a row linear's dgrad is an AG+GEMM with the sizes of the column linear's
    forward pass. The two gradients of a column linear together are a separate case,
    with the sizes of its forward pass. On GPUs, GEMMs without communication are cases,
    too, because they have algorithms to choose from.
    """
    row = shape.row
    yield TunedKey("all_gather_matmul", num_ranks, shape.M, shape.K, shape.N, dtype)
    yield TunedKey("matmul_reduce_scatter", num_ranks, row.M, row.K, row.N, dtype)
    yield TunedKey("matmul_all_reduce", num_ranks, row.M, row.K, row.N, dtype)
    yield TunedKey(COLUMN_GRADIENTS, num_ranks, shape.M, shape.K, shape.N, dtype)
    if is_cuda:
        share = shape.N // num_ranks
        yield from _own_products(shape.M, shape.K, share, dtype)
        yield from _own_products(shape.M, share, shape.K, dtype)


def _own_products(M, K, N, dtype):
    """Yields cases of a rank's GEMMs without communication, for x [M, K], w [K, N]."""
    yield TunedKey("matmul", 1, M, K, N, dtype)
    yield TunedKey("dgrad", 1, M, N, K, dtype)
    yield TunedKey("dgrad_add", 1, M, N, K, dtype)
    yield TunedKey("wgrad", 1, K, M, N, dtype)
    yield TunedKey("wgrad_accumulate", 1, K, M, N, dtype)


def dgrad_of(case: TunedKey) -> TunedKey:
    """Returns the GEMM+RS case that computes the dgrad of a column linear layer."""
    return dataclasses.replace(case, op="matmul_reduce_scatter", K=case.N, N=case.K)


def measure(
    case: TunedKey, choices: Sequence[MethodChoice], rounds: int
) -> tuple[list[Timed], list[tuple[MethodChoice, str]]]:
    """Times all method choices of a case, once per round, with equal operands.

    Returns:
        The timed candidates, fastest first; and the candidates that failed to run, with
        the error text.
    """
    operands = Operands(case)
    candidates: list[Candidate] = []
    refused = []
    for index, choice in enumerate(choices):
        candidate = operands.candidate(str(index), choice)
        try:
            candidate()  # compiles it
        except UbError as error:
            refused.append((choice, str(error)))
        else:
            candidates.append(candidate)
    seconds = interleave(candidates, rounds).seconds
    timed = [
        Timed(choices[int(name)], statistics.median(times) * 1e6)
        for name, times in seconds.items()
    ]
    return sorted(timed, key=lambda one: one.us), refused
