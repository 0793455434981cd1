"""Times the candidates of a case, in turns."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jax_ub.bench.cases import Place
from jax_ub.bench.devices import AXIS, Ranks, Spec
from jax_ub.bench.dots import FastestDots
from jax_ub.bench.timing import Contender, interleave
from jax_ub.bench.workloads import Shape
from jax_ub.errors import UbError
from jax_ub.methods import Method
from jax_ub.overlap_config.tuned import Case, Choice
from jax_ub.primitives.all_gather_matmul import AllGatherMatmul
from jax_ub.primitives.call import Call
from jax_ub.primitives.matmul_all_reduce import MatmulAllReduce
from jax_ub.primitives.matmul_reduce_scatter import MatmulReduceScatter

_ROWS, _COLUMNS = Spec(AXIS, None), Spec(None, AXIS)
_SPECS = {
    "all_gather_matmul": ((_ROWS, _COLUMNS), _COLUMNS),
    "matmul_reduce_scatter": ((_COLUMNS, _ROWS), _ROWS),
    "matmul_all_reduce": ((_COLUMNS, _ROWS), Spec()),
}
_PAIRS = {
    "matmul_reduce_scatter": MatmulReduceScatter,
    "matmul_all_reduce": MatmulAllReduce,
}


@dataclasses.dataclass(frozen=True)
class Timed:
    """One candidate of a case and how long a call took, dispatch included."""

    choice: Choice
    us: float  # the median over the rounds


def cases(shape: Shape, num_ranks: int, dtype: str) -> Iterator[Case]:
    """The products of a column linear of this shape, and of the row linear behind it.

    Those of their gradients have the same sizes: the AG+GEMM that a row linear's
    gradient is has those of the column linear's forward.
    """
    row = shape.row
    yield Case("all_gather_matmul", num_ranks, shape.M, shape.K, shape.N, dtype)
    yield Case("matmul_reduce_scatter", num_ranks, row.M, row.K, row.N, dtype)
    yield Case("matmul_all_reduce", num_ranks, row.M, row.K, row.N, dtype)


def measure(
    case: Case, choices: Sequence[Choice], rounds: int
) -> tuple[list[Timed], list[tuple[Choice, str]]]:
    """Times every candidate once in each round.

    Returns:
        What was timed, the fastest first; and what could not run, with its reason.
    """
    ranks = Ranks(case.num_ranks)
    specs, out_spec = _SPECS[case.op]
    place = Place(ranks, case.dtype, Method.AUTO.value, FastestDots())
    operands = place.arrays(((case.M, case.K), (case.K, case.N)), specs, ranks)
    contenders: list[Contender] = []
    refused = []
    for index, choice in enumerate(choices):
        call = call_of(case, choice)
        program = ranks.program(_function(call), specs, out_spec)
        contender = Contender(str(index), program, operands)
        try:
            contender()  # compiles it
        except UbError as error:
            refused.append((choice, str(error)))
        else:
            contenders.append(contender)
    seconds = interleave(contenders, rounds).seconds
    timed = [
        Timed(choices[int(name)], statistics.median(times) * 1e6)
        for name, times in seconds.items()
    ]
    return sorted(timed, key=lambda one: one.us), refused


def call_of(case: Case, choice: Choice) -> Call:
    """A call of the case's op, done as was chosen, for one kernel without addends."""
    shared: dict[str, Any] = {
        "axis_name": (AXIS,),
        "num_ranks": case.num_ranks,
        "method": Method.AUTO,
        "label": f"tune {case.op}",
        "rhs_transposed": False,
        "has_bias": False,
        "has_residual": False,
        "scale": 1.0,
        "out_dtype": jnp.dtype(case.dtype),
    }
    if case.op in _PAIRS:
        return choice.apply(_PAIRS[case.op](num_pairs=1, **shared))
    return choice.apply(AllGatherMatmul(num_kernels=1, return_gathered=False, **shared))


def _function(call):
    return lambda x, w: call(x, w)[0]
