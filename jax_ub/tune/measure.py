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
from jax_ub.overlap_config.tuned import COLUMN_GRADIENTS, Case, Choice
from jax_ub.primitives.all_gather_matmul import AllGatherMatmul
from jax_ub.primitives.call import Call
from jax_ub.primitives.matmul_all_reduce import MatmulAllReduce
from jax_ub.primitives.matmul_reduce_scatter import MatmulReduceScatter
from jax_ub.rules.column_gradients import column_gradients
from jax_ub.rules.site import Site

_ROWS, _COLUMNS = Spec(AXIS, None), Spec(None, AXIS)
# By op: the sizes of its operands, how they are sharded, and how the results are.
_LAYOUTS = {
    "all_gather_matmul": (("MK", "KN"), (_ROWS, _COLUMNS), _COLUMNS),
    "matmul_reduce_scatter": (("MK", "KN"), (_COLUMNS, _ROWS), _ROWS),
    "matmul_all_reduce": (("MK", "KN"), (_COLUMNS, _ROWS), Spec()),
    COLUMN_GRADIENTS: (
        ("MK", "KN", "MN"),
        (_ROWS, _COLUMNS, _COLUMNS),
        (_ROWS, _COLUMNS),
    ),
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
    gradient is has those of the column linear's forward. How a column linear's two
    gradients run together is a case of its own, with the sizes of its forward.
    """
    row = shape.row
    yield Case("all_gather_matmul", num_ranks, shape.M, shape.K, shape.N, dtype)
    yield Case("matmul_reduce_scatter", num_ranks, row.M, row.K, row.N, dtype)
    yield Case("matmul_all_reduce", num_ranks, row.M, row.K, row.N, dtype)
    yield Case(COLUMN_GRADIENTS, num_ranks, shape.M, shape.K, shape.N, dtype)


def dgrad_of(case: Case) -> Case:
    """The product that a column linear's dgrad is, a GEMM+RS."""
    return dataclasses.replace(case, op="matmul_reduce_scatter", K=case.N, N=case.K)


def measure(
    case: Case, choices: Sequence[Choice], rounds: int
) -> tuple[list[Timed], list[tuple[Choice, str]]]:
    """Times every candidate once in each round.

    Returns:
        What was timed, the fastest first; and what could not run, with its reason.
    """
    ranks = Ranks(case.num_ranks)
    names, in_specs, out_specs = _LAYOUTS[case.op]
    sizes = [(getattr(case, name[0]), getattr(case, name[1])) for name in names]
    place = Place(ranks, case.dtype, Method.AUTO.value, FastestDots())
    operands = place.arrays(sizes, in_specs, ranks)
    contenders: list[Contender] = []
    refused = []
    for index, choice in enumerate(choices):
        program = ranks.program(_function(case, choice), in_specs, out_specs)
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


def _function(case, choice):
    if case.op == COLUMN_GRADIENTS:
        return _column_gradients(case, choice)
    call = call_of(case, choice)
    return lambda x, w: call(x, w)[0]


def _column_gradients(case, choice):
    dtype = jnp.dtype(case.dtype)
    site = Site(
        op="tune",
        label=f"tune {case.op}",
        axis_name=(AXIS,),
        num_ranks=case.num_ranks,
        method=choice.method,
        is_tracked=True,
        num_splits=choice.num_splits,
        tuning=choice.tuning,
    ).with_dtypes(dtype, dtype)

    def gradients(x, w, dy):
        saved = {"x": x, "gathered": None, "ws": (w,), "main_grads": None}
        dx, dws = column_gradients(site, saved, {0: dy}, None)
        return dx, dws[0]

    return gradients
