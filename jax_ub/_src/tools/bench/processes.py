"""`bench --processes 2,4`: one rank in each process, against XLA with gloo.

In the same rounds, process 0 also runs the op on as many of its own devices, the plain
GEMM and the peak, using all cores while the other processes wait. The overhead of
several processes is therefore a ratio of times measured shortly after each other.
"""

import pathlib
import pickle
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

import jax_ub as ub
from jax_ub._src import lowering_log
from jax_ub._src.dtypes import SHORT_NAMES
from jax_ub._src.lowering_log import Fallback
from jax_ub._src.runtime import communicators, cpu_engine
from jax_ub._src.tools import command_line, timing
from jax_ub._src.tools.bench import cases, latency, linear, report
from jax_ub._src.tools.bench.cases import Case, Options, Setup
from jax_ub._src.tools.bench.linear import FORWARD_OPS, LinearOp
from jax_ub._src.tools.bench.peers import FastestDots, dot_variants
from jax_ub._src.tools.bench.report import Result, evaluate
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import AXIS, ROWS, ProcessRanks, Ranks, Spec
from jax_ub._src.tools.launch import parts
from jax_ub._src.tools.timing import Candidate, Rounds, summarize

OPS = (*FORWARD_OPS, "latency", "barrier")
_BARRIERS, _BATCHES = 500, 15
# How often each of XLA's programs is timed to find the fastest one. Two times were too
# few: at 64 rows in bf16, they selected a program that takes 1.5 times as long.
_TRIALS = 8


def run_job(
    num_processes: int, options: Options
) -> tuple[dict[str, Any], list[Result], tuple[Fallback, ...]]:
    """Runs the benchmark in several processes, and returns what process 0 measured.

    These are its environment, the results and the fallbacks to plain JAX.
    """
    lists = {
        "processes": [num_processes],
        "ops": options.ops,
        "dtypes": [SHORT_NAMES[dtype] for dtype in options.dtypes],
        "shapes": options.shapes,
    }
    arguments = [f"--{name}={','.join(map(str, lists[name]))}" for name in lists]
    for name in ("rounds", "patience", "method"):
        arguments.append(f"--{name}={getattr(options, name)}")
    # Each process has as many devices as there are ranks, because process 0 also runs
    # every op on its own devices alone.
    with parts.parts_of(
        "bench",
        arguments,
        num_processes=num_processes,
        devices_per_process=num_processes,
        stdout=command_line.progress_file(),
    ) as paths:
        return pickle.loads(paths[0].read_bytes())


def run_part(path: pathlib.Path, options: Options) -> None:
    """Runs the benchmark in one process of a job; process 0 writes the results."""
    with parts.exit_on_failure():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize()
        job = Job(options)
        tokens = max(shape.M for shape in options.shapes)
        features = max(max(shape.K, shape.N) for shape in options.shapes)
        num, mesh = job.num_processes, job.ranks.mesh
        ub.initialize_ub((tokens, features), num, mesh=mesh, axis_name=AXIS)
        environment = report.environment()
        results = []
        for result in job.measure():
            results.append(result)
            if job.is_first:
                print(report.PROCESSES.row(result), flush=True)
        if job.is_first:
            found = environment, results, lowering_log.fallbacks()
            parts.part_path(path, 0).write_bytes(pickle.dumps(found))
        job.synchronize()
        ub.destroy_ub()


class Job:
    """Builds, checks and times the cases of a multi-process benchmark."""

    def __init__(self, options: Options) -> None:
        self.num_processes = jax.process_count()
        self.is_first = jax.process_index() == 0
        self.ranks = ProcessRanks(self.num_processes)
        self._options, self._dots = options, FastestDots()
        self._psum = self.ranks.program(lambda x: lax.psum(x, AXIS), (ROWS,), Spec())
        ones = np.ones(self.num_processes, np.float32)
        self._ones = self.ranks.place(ones, ROWS)
        self.synchronize()
        # All cases share one measurement of the CPU load by other programs: it covers
        # at least 0.1 s, and the rounds of one case may be shorter.
        self._load = timing.BackgroundLoad(self._cpu_seconds)

    def synchronize(self) -> None:
        """Waits, in an all-reduce, until every process of the job has called this."""
        jax.block_until_ready(self._psum(self._ones))

    def measure(self) -> Iterator[Result]:
        for op in self._options.ops:
            if op == "barrier":
                yield self._barrier()
            elif op == "latency":
                # The time of one all-reduce of 256 elements per rank: that of 101
                # chained calls minus that of 1 call, divided by 100.
                yield self._timed(latency.all_reduce_latency(self._setup("float32")))
            else:
                for dtype in self._options.dtypes:
                    for shape in self._options.shapes:
                        case = self.forward_case(FORWARD_OPS[op], dtype, shape)
                        cases.check_agreement(case)
                        yield self._timed(case)

    def forward_case(self, op: LinearOp, dtype: str, column: Shape) -> Case:
        """Returns the benchmark case of a forward op, with one rank in each process.

        `column` has the sizes of the column-parallel layer; a row-parallel op swaps K
        and N.
        """
        method, local = self._options.method, Ranks(self.num_processes)
        candidate, in_process, alone = (
            op.candidate_factory(ranks, dtype, column)
            for ranks in (self.ranks, local, Ranks(1))
        )
        ((name, (left, right)),) = op.local_operands(column, self.num_processes).items()
        dots = dot_variants("nn", dtype)
        index = 0  # process 0 measures XLA's fastest dot on its own devices
        if self.is_first:
            index = dots.index(self._dots("nn", dtype, left, right, local))
        index = int(self._gather([index])[0, 0])
        programs = op.in_xla({name: dots[index]}, dtype)
        candidates = [
            candidate(cases.OWN, op.own(method)),
            linear.fastest_of(
                candidate, cases.BEST, programs, self.interleave, _TRIALS
            ),
            candidate(cases.NAIVE, op.naive),
            in_process(cases.IN_PROCESS, op.own(method)),
            alone(cases.PLAIN, op.own("direct")),
        ]
        return self._setup(dtype).case(op.name, op.shape(column), candidates)

    def interleave(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        patience: int = 1,
        alone: Collection[str] = (),
    ) -> Rounds:
        """Times programs in interleaved rounds, by the slowest process in each round.

        All processes keep the same rounds. Only process 0 runs the programs in `alone`.
        """
        found = timing.interleave(
            candidates,
            rounds,
            patience,
            load=self._load,
            agree=lambda share: float(self._gather([share]).max()),
            measure=lambda candidate: self._measure(candidate, candidate.name in alone),
        )
        times = np.array(list(found.seconds.values()))
        slowest = self._gather(times.ravel()).max(axis=0).reshape(times.shape)
        seconds = dict(zip(found.seconds, slowest.tolist(), strict=True))
        return Rounds(seconds, found.elsewhere)

    def _measure(self, candidate, is_alone):
        """Returns the seconds of a call that starts in all processes simultaneously.

        If `is_alone`, process 0 runs it with all cores while the other processes wait.
        """
        self.synchronize()
        if not is_alone:
            return candidate.seconds()
        if not self.is_first:
            return 0.0
        with timing.engine_threads(cpu_engine.load().default_num_threads()):
            return candidate.seconds()

    def _barrier(self):
        """Times a barrier of jax_ub's engine between all processes of the job."""
        (connection,) = communicators.connections()
        barrier_seconds = connection.communicator.barrier_seconds
        self.synchronize()
        barrier_seconds(_BARRIERS)
        times = [barrier_seconds(_BARRIERS) for _ in range(_BATCHES)]
        slowest = self._gather(times).max(axis=0)
        case = self._setup("").case("barrier", Shape(1, 1, 1), [], num_gemms=0)
        return Result(case, {cases.OWN: summarize(1e6 * slowest)})

    def _timed(self, case):
        rounds, patience = self._options.rounds, self._options.patience
        self.interleave(case.candidates, 1, alone=cases.LIMITS)
        timed = self.interleave(case.candidates, rounds, patience, cases.LIMITS)
        return evaluate(case, timed)

    def _setup(self, dtype):
        return Setup(self.ranks, dtype, self._options.method, self._dots)

    def _gather(self, values):
        """All-gathers f64 values of all processes, [num_processes, len(values)]."""
        with jax.enable_x64(True):
            return multihost_utils.process_allgather(np.asarray(values, np.float64))

    def _cpu_seconds(self):
        """Returns the CPU seconds that all processes together have used so far."""
        return float(self._gather([time.process_time()]).sum())
