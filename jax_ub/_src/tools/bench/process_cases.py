"""Benchmark cases of one device in each of several processes, against XLA with gloo.

In the same rounds, process 0 also runs the op on as many of its own devices, the plain
GEMM and the peak, using all cores while the other processes wait. The overhead of
several processes is therefore a ratio of times measured shortly after each other.
"""

from collections.abc import Sequence

import numpy as np

import jax_ub as ub
from jax_ub._src.tools.bench import cases, dots, latency_cases, peers
from jax_ub._src.tools.bench.cases import Case, tolerance
from jax_ub._src.tools.bench.devices import AXIS, Ranks
from jax_ub._src.tools.bench.dots import FastestDots
from jax_ub._src.tools.bench.forward_ops import FORWARD_OPS, Program
from jax_ub._src.tools.bench.gemm_cases import plain_gemm
from jax_ub._src.tools.bench.job import Job, LocalMesh
from jax_ub._src.tools.bench.peak import at_peak
from jax_ub._src.tools.bench.results import Result, evaluate
from jax_ub._src.tools.bench.statistics import summarize
from jax_ub._src.tools.bench.timing import Candidate
from jax_ub._src.tools.bench.workloads import Shape

OPS = tuple(FORWARD_OPS)
_BARRIERS, _BATCHES = 500, 15


class Bench:
    """Builds, checks and times the benchmark cases of a multi-process job.

    Every process of the job creates one and calls its methods in the same order.
    """

    def __init__(self, job: Job, method: str, rounds: int, patience: int):
        """Sets the method under test, and how many rounds each case keeps and runs.

        A case keeps `rounds` rounds and runs at most `rounds * patience`.
        """
        self._job = job
        self._method = method
        self._rounds = rounds
        self._patience = patience
        self._dots = FastestDots()

    def forward(self, name: str, dtype: str, column: Shape) -> Result:
        """Times the op `name`, one rank per process, against XLA with gloo.

        The sizes are those of an MLP whose column linear layer has the shape `column`.
        """
        op, job = FORWARD_OPS[name], self._job
        shape = op.shape(column)
        dot = self._fastest_dot(op, dtype, shape)

        def candidate(name: str, function: Program, ranks: Ranks, way: str = ""):
            operands = ranks.draw(dtype, shape.operands, op.in_specs)
            program = ranks.program(function, op.in_specs, op.out_spec)
            return Candidate(name, program, operands, way=way)

        best = job.fastest(
            [
                candidate(cases.BEST, function, job.ranks, way)
                for way, function in op.ways(dot, dtype).items()
            ]
        )
        own = op.own(self._method)
        together = [
            candidate(cases.OWN, own, job.ranks),
            best,
            candidate(cases.NAIVE, op.naive, job.ranks),
        ]
        self._check(name, dtype, shape, together)
        alone = [
            Candidate(cases.IN_PROCESS, None, []),
            Candidate(cases.PLAIN, None, []),
            Candidate(cases.PEAK, None, []),
        ]
        if job.is_first:
            alone = [
                candidate(cases.IN_PROCESS, own, LocalMesh(job.num_processes)),
                plain_gemm(LocalMesh(1), self._method, dtype, shape),
                *at_peak(job.ranks, dtype, shape.flops),
            ]
        case = self._case(name, dtype, shape, shape.flops)
        return self._timed(case, together, alone)

    def barrier(self) -> Result:
        """Times a barrier, which blocks until all processes of the job have arrived.

        It uses the barrier of jax_ub's CPU engine.
        """
        case = self._case("barrier", "", Shape(1, 1, 1), 0)
        times = self._job.barrier_s(_BARRIERS, _BATCHES)
        own = summarize([1e6 * seconds for seconds in times])
        return Result(case, {cases.OWN: own}, {}, {}, 0.0)

    def latency(self) -> Result:
        """Times an all-reduce of 256 elements per rank, from chains of 101 and 1."""
        together = latency_cases.chains(
            self._job.ranks,
            "float32",
            lambda x, w: ub.all_reduce(x, axis_name=AXIS),
            lambda x, w: peers.all_reduce(x),
        )
        case = self._case("latency", "float32", latency_cases.SHAPE, 0)
        case.variant, case.calls = "all_reduce", latency_cases.MORE_CALLS
        return self._timed(case, together, [])

    def _timed(self, case, together, alone):
        case.candidates = [*together, *alone]
        for candidate in case.candidates:
            self._job.meet()
            if candidate.program is not None:
                candidate()
        rounds = self._job.interleave(together, alone, self._rounds, self._patience)
        return evaluate(case, rounds)

    def _case(self, op, dtype, shape, flops):
        num = self._job.num_processes
        return Case(
            op=op,
            variant="",
            dtype=dtype,
            num_ranks=num,
            shape=shape,
            flops=flops,
            candidates=[],
            num_processes=num,
        )

    def _fastest_dot(self, op, dtype, shape):
        """Returns XLA's fastest dot, which process 0 measures on its own devices."""
        num = self._job.num_processes
        every = dots.ways("nn", dtype)
        index = 0
        if self._job.is_first:
            left, right = op.local_shapes(shape, num)
            index = every.index(self._dots("nn", dtype, left, right, LocalMesh(num)))
        return every[self._job.choice(index)]

    def _check(self, op, dtype, shape, together):
        found = [_here(candidate()) for candidate in together]
        bound = tolerance(dtype, shape.K)
        for candidate, values in zip(together, found, strict=True):
            worst = float(np.max(np.abs(values - found[1])) / np.max(np.abs(found[1])))
            if not worst <= bound:
                raise ArithmeticError(
                    f"bench: {op} {shape} {dtype} in {self._job.num_processes} "
                    f"processes: {candidate.name} differs from {cases.BEST} by "
                    f"{worst:.2e} of the largest value, more than {bound:.2e}. One of "
                    "them is wrong; run the tests of the op."
                )


def _here(array):
    return np.asarray(array.addressable_data(0)).astype(np.float64)


def capacity(shapes: Sequence[Shape]) -> tuple[int, int]:
    """Returns `initialize_ub`'s argument `shape`, [tokens, features], for `shapes`."""
    tokens = max(shape.M for shape in shapes)
    return tokens, max(max(shape.K, shape.N) for shape in shapes)
