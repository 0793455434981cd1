"""The forward ops over one device of each process, against XLA with gloo.

In the same run process 0 computes the same op on as many devices of its own, the plain
GEMM and the peak, with all cores, while the other processes wait: what crossing a
process costs is a ratio of neighbours in time as well.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

import jax_ub as ub
from jax_ub.bench import cases, dots, peers
from jax_ub.bench.cases import Case, tolerance
from jax_ub.bench.devices import AXIS, Ranks, Spec, normal
from jax_ub.bench.dots import FastestDots
from jax_ub.bench.gemm_cases import own_gemm
from jax_ub.bench.job import Here, Job
from jax_ub.bench.latency_cases import MORE_CALLS, chain
from jax_ub.bench.peak import at_peak
from jax_ub.bench.results import Result, evaluate
from jax_ub.bench.statistics import summarize
from jax_ub.bench.timing import Contender
from jax_ub.bench.workloads import Shape

_ROWS, _COLUMNS = Spec(AXIS, None), Spec(None, AXIS)
_NARROW_AND_WIDE = (False, True)
# How x and w, and y, of each op are sharded.
_LAYOUTS = {
    "all_gather_matmul": ((_ROWS, _COLUMNS), _COLUMNS),
    "matmul_reduce_scatter": ((_COLUMNS, _ROWS), _ROWS),
    # Every rank gets all rows; they are stacked, so that nothing checks that.
    "matmul_all_reduce": ((_COLUMNS, _ROWS), _ROWS),
}
_OWN: dict[str, Callable[..., jax.Array]] = {
    "all_gather_matmul": ub.all_gather_matmul,
    "matmul_reduce_scatter": ub.matmul_reduce_scatter,
    "matmul_all_reduce": ub.matmul_all_reduce,
}
_NAIVE = {
    "all_gather_matmul": peers.naive_column,
    "matmul_reduce_scatter": peers.naive_row,
    "matmul_all_reduce": peers.naive_all_reduce,
}
_REDUCTIONS = {
    "matmul_reduce_scatter": {"psum_scatter": peers.scatter},
    "matmul_all_reduce": {
        "psum": peers.all_reduce,
        "psum_scatter and all_gather": peers.scatter_and_gather,
    },
}
OPS = tuple(_OWN)
_BARRIERS, _BATCHES = 500, 15


class Bench:
    """Makes, checks and times the cases of a job."""

    def __init__(self, job: Job, method: str, rounds: int):
        """Measures with `rounds` rounds each."""
        self._job = job
        self._method = method
        self._rounds = rounds
        self._dots = FastestDots()

    def forward(self, op: str, dtype: str, shape: Shape) -> Result:
        """One op at one size; the row linear after the column linear of that size."""
        shape = shape if op == "all_gather_matmul" else shape.row
        job = self._job
        best = job.fastest(list(self._ways(op, dtype, shape)))
        together = [
            self._contender(cases.OWN, self._own(op), op, dtype, shape, job.ranks),
            best,
            self._contender(cases.NAIVE, _NAIVE[op], op, dtype, shape, job.ranks),
        ]
        self._check(op, dtype, shape, together)
        alone = self._alone(op, dtype, shape) if job.is_first else []
        with_first = [
            Contender(cases.IN_PROCESS, None, []),
            Contender(cases.PLAIN, None, []),
            Contender(cases.PEAK, None, []),
        ]
        return self._timed(
            op, "", dtype, shape, shape.flops, together, alone or with_first
        )

    def barrier(self) -> Result:
        """The engine's barrier alone."""
        case = self._case("barrier", "", "", Shape(1, 1, 1), 0, [])
        times = self._job.barrier_s(_BARRIERS, _BATCHES)
        own = summarize([1e6 * seconds for seconds in times])
        return Result(case, {cases.OWN: own}, {}, {}, 0.0)

    def latency(self) -> Result:
        """A call that moves 256 numbers, from a chain of 101 calls less one of 1."""
        ranks, num = self._job.ranks, self._job.num_processes
        operands = [
            ranks.place(normal(0, (num * 16, 16), "float32"), Spec(AXIS)),
            ranks.place(normal(1, (16, 16), "float32", 0.025), Spec()),
        ]
        calls = {
            cases.OWN: lambda x, w: ub.all_reduce(x, axis_name=AXIS),
            cases.BEST: lambda x, w: peers.all_reduce(x),
        }
        together = [
            Contender(
                f"{name}{suffix}",
                ranks.program(
                    functools.partial(chain, call, calls=count, num_ranks=num),
                    (Spec(AXIS), Spec()),
                    Spec(AXIS),
                ),
                operands,
            )
            for name, call in calls.items()
            for suffix, count in (("", 1 + MORE_CALLS), ("_once", 1))
        ]
        shape = Shape(16, 16, 16)
        return self._timed("latency", "all_reduce", "float32", shape, 0, together, [])

    def _timed(self, op, variant, dtype, shape, flops, together, alone):
        for contender in (*together, *alone):
            self._job.meet()
            if contender.program is not None:
                contender()
        rounds = self._job.interleave(together, alone, self._rounds)
        case = self._case(op, variant, dtype, shape, flops, [*together, *alone])
        case.calls = MORE_CALLS if op == "latency" else 1
        return evaluate(case, rounds)

    def _case(self, op, variant, dtype, shape, flops, contenders):
        num = self._job.num_processes
        return Case(
            op=op,
            variant=variant,
            dtype=dtype,
            num_ranks=num,
            shape=shape,
            flops=flops,
            contenders=contenders,
            num_processes=num,
        )

    def _own(self, op):
        return functools.partial(_OWN[op], axis_name=AXIS, method=self._method)

    def _ways(self, op: str, dtype: str, shape: Shape) -> Iterator[Contender]:
        """XLA's collectives around its fastest dot, and as people write it."""
        ranks = self._job.ranks
        dot = self._fastest_dot(op, dtype, shape)
        if op == "all_gather_matmul":
            written = {str(dot): lambda x, w: dot(peers.gather(x), w, x.dtype)}
        else:
            narrow_and_wide = _NARROW_AND_WIDE[: 1 if dtype == "float32" else 2]
            written = {
                f"{dot}, {name} in {'float32' if wide else dtype}": peers.reduced(
                    collective, dot, wide
                )
                for name, collective in _REDUCTIONS[op].items()
                for wide in narrow_and_wide
            }
        written[cases.AS_WRITTEN] = _NAIVE[op]
        for way, function in written.items():
            made = self._contender(cases.BEST, function, op, dtype, shape, ranks)
            made.way = way
            yield made

    def _fastest_dot(self, op, dtype, shape):
        """Measured by process 0 on as many devices of its own, while others wait."""
        num = self._job.num_processes
        left, right = (shape.M, shape.K), (shape.K, shape.N // num)
        if op != "all_gather_matmul":
            left, right = (shape.M, shape.K // num), (shape.K // num, shape.N)
        every = dots.ways("nn", dtype)
        index = 0
        if self._job.is_first:
            index = every.index(self._dots("nn", dtype, left, right, Here(num)))
        return every[self._job.choice(index)]

    def _contender(
        self,
        name: str,
        function: Callable[..., jax.Array],
        op: str,
        dtype: str,
        shape: Shape,
        ranks: Ranks,
    ) -> Contender:
        in_specs, out_spec = _LAYOUTS[op]
        sizes = ((shape.M, shape.K), (shape.K, shape.N))
        operands = [
            ranks.place(normal(seed, size, dtype), spec)
            for seed, (size, spec) in enumerate(zip(sizes, in_specs, strict=True))
        ]
        return Contender(name, ranks.program(function, in_specs, out_spec), operands)

    def _alone(self, op, dtype, shape):
        num = self._job.num_processes
        here = self._contender(
            cases.IN_PROCESS, self._own(op), op, dtype, shape, Here(num)
        )
        sizes, specs = ((shape.M, shape.K), (shape.K, shape.N)), (Spec(), Spec())
        operands = [
            Here(1).place(normal(seed, size, dtype), Spec())
            for seed, size in enumerate(sizes)
        ]
        nn = own_gemm(self._method, "nn")
        plain = Here(1).program(lambda x, w: nn(x, w, None, None), specs, Spec())
        peak = at_peak(self._job.ranks, dtype, shape.flops)
        return [here, Contender(cases.PLAIN, plain, operands), *peak]

    def _check(self, op, dtype, shape, together):
        found = [_here(contender()) for contender in together]
        bound = tolerance(dtype, shape.K)
        for contender, values in zip(together, found, strict=True):
            worst = float(np.max(np.abs(values - found[1])) / np.max(np.abs(found[1])))
            if not worst <= bound:
                raise ArithmeticError(
                    f"bench: {op} {shape} {dtype} in {self._job.num_processes} "
                    f"processes: {contender.name} differs from {cases.BEST} by "
                    f"{worst:.2e} of the largest value, more than {bound:.2e}. One of "
                    "them is wrong; run the tests of the op."
                )


def _here(array):
    return np.asarray(array.addressable_data(0)).astype(np.float64)


def capacity(shapes) -> tuple[int, int]:
    """`shape` of `initialize_ub` for these sizes."""
    tokens = max(shape.M for shape in shapes)
    return tokens, max(max(shape.K, shape.N) for shape in shapes)
