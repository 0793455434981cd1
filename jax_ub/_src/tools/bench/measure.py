"""Measures the cases of a benchmark, in this process or in several (`--processes`).

With several processes, each has one rank, and XLA uses gloo. In the same rounds,
process 0 also runs the op on as many of its own devices, and the limits, using all
cores while the other processes wait. The overhead of several processes is therefore a
ratio of times measured shortly after each other.
"""

import functools
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

import jax_ub as ub
from jax_ub._src import lowering_log
from jax_ub._src.dtypes import BY_SHORT_NAME
from jax_ub._src.runtime import communicators, cpu_engine
from jax_ub._src.tools import command_line, timing
from jax_ub._src.tools.bench import cases, linear, report
from jax_ub._src.tools.bench.cases import Case, Options, Setup
from jax_ub._src.tools.bench.fused import fused
from jax_ub._src.tools.bench.gemm import VARIANTS, local
from jax_ub._src.tools.bench.linear import FORWARD_OPS, LINEAR_OPS
from jax_ub._src.tools.bench.report import Result, evaluate
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, ROWS, ProcessRanks, Ranks, Spec
from jax_ub._src.tools.launch import parts
from jax_ub._src.tools.timing import Candidate

# Number of barriers of jax_ub's engine that are timed together.
_NUM_BARRIERS = 500


class Barriers(Candidate):
    """A candidate that times one barrier between all processes of a job."""

    def seconds(self) -> float:
        return self()


def barrier(setup: Setup, shape: Shape) -> list[Case]:
    """Returns the case that times a barrier of jax_ub's engine, which XLA lacks."""
    (connection,) = communicators.connections()
    seconds = connection.communicator.barrier_seconds
    barriers = Barriers(cases.OWN, seconds, [_NUM_BARRIERS])
    return [setup.case("barrier", Shape(1, 1, 1), [barriers], num_gemms=0)]


# Maps each op to the function that builds the benchmark cases of the op.
OPS: dict[str, Callable[[Setup, Shape], list[Case]]] = {
    **{name: functools.partial(local, name) for name in VARIANTS},
    **{name: functools.partial(linear.linear, op) for name, op in LINEAR_OPS.items()},
    "fused": fused,
    "latency": linear.latency,
    "small": linear.small,
    "barrier": barrier,
}
FP8_OPS = tuple(LINEAR_OPS)
JOB_OPS = (*FORWARD_OPS, "latency", "barrier")  # that are measured with --processes
# Sizes of the ops that ignore --shapes. The op "barrier" also ignores --dtypes.
FIXED_SHAPES = {
    "latency": [linear.LATENCY_SHAPE],
    "small": [*linear.SMALL_SHAPES.values()],
    "barrier": [],
}


def measure(
    chosen: Options, ranks_of: Callable[[int], Ranks] = Ranks
) -> Iterator[Result]:
    """Builds, checks and times all benchmark cases, and yields their results.

    The ranks are devices of this process, or of all processes of a `Job`.
    """
    sizes = [
        (op, dtype, num_ranks, shape)
        for op in chosen.ops
        for dtype in (chosen.dtypes[:1] if op == "barrier" else chosen.dtypes)
        for num_ranks in chosen.devices
        if op in FP8_OPS or dtype not in cases.FP8_RECIPES
        for shape in (chosen.shapes[:1] if op in FIXED_SHAPES else chosen.shapes)
    ]
    for op, dtype, num_ranks, shape in command_line.progress("bench", sizes):
        name = BY_SHORT_NAME.get(dtype, dtype)
        setup = Setup(ranks_of(num_ranks), name, chosen.variants)
        for case in OPS[op](setup, shape):
            cases.check_agreement(case)
            candidates = _candidates(case, chosen.threads)
            # An untimed round precedes the timed ones, because the first two calls of a
            # program may compile it. The second call compiles if the first one has
            # replaced a donated operand by a result with another sharding.
            setup.ranks.interleave(candidates, 1)
            rounds = (chosen.rounds, chosen.patience)
            yield evaluate(case, setup.ranks.interleave(candidates, *rounds))


def _candidates(case: Case, threads: Sequence[int]) -> Sequence[Any]:
    """Returns the programs of a case: jax_ub's and those that it is compared with.

    All programs run with the first number of --threads. With another one, such as 16,
    only jax_ub's program runs, named "jax_ub@16". Without --threads, no number is set.
    """
    if not threads:
        return case.candidates
    first, *others = threads
    own = case[cases.OWN]
    return [timing.WithThreads(c.name, c, first) for c in case.candidates] + [
        timing.WithThreads(f"{own.name}@{number}", own, number) for number in others
    ]


class Job(ProcessRanks):
    """A timer of programs in all processes of a job. Each process has one rank.

    The slowest process determines the time of a call, so all processes get the same
    times.
    """

    # Fewer trials are not reliable: with two trials, a program was selected that takes
    # 1.5 times as long as the fastest one (64 rows, bf16).
    num_trials = 8

    @functools.cached_property
    def _psum(self):
        psum = self.program(lambda x: lax.psum(x, AXIS), (ROWS,), Spec())
        ones = self.place(np.ones(self.num_ranks, np.float32), ROWS)
        return functools.partial(psum, ones)

    def synchronize(self) -> None:
        """Waits until every process of the job has called this, by an all-reduce."""
        jax.block_until_ready(self._psum())

    def _seconds(self, candidate):
        """Returns the seconds of a call that starts in all processes simultaneously.

        Process 0 runs the limits, with all cores, while the other processes wait.
        """
        self.synchronize()
        seconds = 0.0
        if candidate.name not in cases.LIMITS:
            seconds = candidate.seconds()
        elif jax.process_index() == 0:
            with timing.engine_threads(cpu_engine.load().default_num_threads()):
                seconds = candidate.seconds()
        return max(self._gather(seconds))

    @functools.cached_property
    def _load(self):
        return timing.BackgroundLoad(lambda: sum(self._gather(process_time())))

    def _share(self, candidates):
        return max(self._gather(super()._share(candidates)))

    def _gather(self, value: float) -> list[float]:
        """Returns the values of all processes, which are all-gathered in f64."""
        with jax.enable_x64(True):
            return multihost_utils.process_allgather(np.float64(value)).tolist()


def run_jobs(options: Options) -> Iterator[Result]:
    """Runs the benchmark in several processes, with a job for each --processes value.

    Yields the results of process 0, and records its fallbacks to plain JAX as those of
    this process.
    """
    for num_processes in command_line.progress("bench", options.devices):
        values = vars(options) | {"devices": (), "processes": num_processes}
        lists = {n: v if isinstance(v, tuple) else (v,) for n, v in values.items() if v}
        # Each process has as many devices as there are ranks, because process 0 also
        # runs every op on its own devices alone.
        with parts.parts_of(
            "bench",
            [f"--{name}={','.join(map(str, lists[name]))}" for name in lists],
            num_processes=num_processes,
            devices_per_process=num_processes,
            stdout=command_line.progress_file(),
        ) as paths:
            results, fallbacks = pickle.loads(paths[0].read_bytes())
        for fallback in fallbacks:
            lowering_log.record_fallback(fallback.label, fallback.reason)
        yield from results


def run_part(path: pathlib.Path, options: Options) -> None:
    """Runs the benchmark in one process of a job; process 0 writes the results."""
    with parts.exit_on_failure():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize()
        job, is_first = Job(jax.process_count()), jax.process_index() == 0
        tokens = max(shape.M for shape in options.shapes)
        features = max(max(shape.K, shape.N) for shape in options.shapes)
        capacity = (tokens, features)
        ub.initialize_ub(capacity, job.num_ranks, mesh=job.mesh, axis_name=AXIS)
        results = []
        for result in measure(options, lambda num_ranks: job):
            results.append(result)
            if is_first:
                print(report.table([result]), flush=True)
        if is_first:
            found = results, lowering_log.fallbacks()
            parts.part_path(path, 0).write_bytes(pickle.dumps(found))
        job.synchronize()
        ub.destroy_ub()
