"""A benchmark in several processes: meshes, a common start, and whose time counts."""

import contextlib
import dataclasses
import functools
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub.bench.background_load import BackgroundLoad
from jax_ub.bench.devices import AXIS, Ranks, Spec
from jax_ub.bench.timing import Candidate, Rounds, RoundSelector
from jax_ub.runtime import engine

# A barrier needs no memory; this is the least that a communicator takes.
_PAGE_BYTES = 4096
# Rounds in which the fastest way is looked for. With two, gloo's 64 rows in bf16 came
# out as people write them, which takes half as long again as the fastest way.
_TRIALS = 8


@dataclasses.dataclass(frozen=True)
class ProcessMesh(Ranks):
    """One device of each process as a mesh."""

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over axis `AXIS`, in the order of processes."""
        first = [jax.local_devices(process)[0] for process in range(self.num_ranks)]
        return Mesh(np.array(first), (AXIS,))

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Puts a global array, the same in all processes, on the mesh."""
        array = np.asarray(array)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )


@dataclasses.dataclass(frozen=True)
class LocalMesh(Ranks):
    """As many devices of this process."""

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over axis `AXIS`."""
        return Mesh(np.array(jax.local_devices()[: self.num_ranks]), (AXIS,))


class Job:
    """The processes of a benchmark, of which process 0 also measures alone."""

    def __init__(self) -> None:
        """Joins the job that the launcher started."""
        self.num_processes = jax.process_count()
        self.is_first = jax.process_index() == 0
        self.ranks = ProcessMesh(self.num_processes)
        self._meet = self.ranks.program(
            lambda x: lax.psum(x, AXIS), (Spec(AXIS),), Spec()
        )
        ones = np.ones(self.num_processes, np.float32)
        self._ones = self.ranks.place(ones, Spec(AXIS))
        self.meet()

    def meet(self) -> None:
        """Returns when every process has come here."""
        jax.block_until_ready(self._meet(self._ones))

    def slowest(self, seconds: Sequence[float]) -> np.ndarray:
        """The time of the slowest process, for each of the same measurements."""
        return self._of_all(seconds).max(axis=0)

    def cpu_seconds(self) -> float:
        """What all processes together have had of the cores."""
        return float(self._of_all([time.process_time()]).sum())

    def _of_all(self, seconds):
        """The measurements of every process, a row for each."""
        mine = np.asarray(seconds, np.float64).view(np.uint32)
        every = np.asarray(multihost_utils.process_allgather(mine))
        each = every.reshape(self.num_processes, -1).astype(np.uint32)
        return np.ascontiguousarray(each).view(np.float64)

    def choice(self, index: int) -> int:
        """What process 0 chose."""
        chosen = np.asarray([index], np.int32)
        return int(multihost_utils.broadcast_one_to_all(chosen)[0])

    def fastest(self, ways: Sequence[Candidate]) -> Candidate:
        """The fastest of several ways to write the same program, for all processes."""
        if len(ways) == 1:
            return ways[0]
        seconds = []
        for timed in range(1 + _TRIALS):
            for way in ways:
                self.meet()
                taken = way.seconds()
                if timed:  # the first call compiles
                    seconds.append(taken)
        best = self.slowest(seconds).reshape(_TRIALS, len(ways)).min(axis=0)
        return ways[int(np.argmin(best))]

    def interleave(
        self,
        together: Sequence[Candidate],
        alone: Sequence[Candidate],
        rounds: int,
        patience: int,
    ) -> Rounds:
        """Times every candidate once in each round, as `timing.interleave` does.

        Args:
            together: what all processes run; the slowest one's time counts.
            alone: what process 0 runs, while the others wait.
            rounds: how many are kept.
            patience: how many times as many are run at most, by process 0's judgement.
        """
        others = BackgroundLoad(own_seconds=self.cpu_seconds)
        waiting = RoundSelector(rounds, patience)
        seconds: list[float] = []
        lonely: list[list[float]] = []
        while not self.choice(waiting.is_over):
            number = waiting.num_rounds
            times = [0.0] * len(together)
            extra = [1.0] * len(alone)  # where nothing is measured
            places = range(len(together) + len(alone))
            for place in random.Random(number).sample(places, len(places)):
                self.meet()
                other = place - len(together)
                if other < 0:
                    times[place] = together[place].seconds()
                elif self.is_first:
                    with all_cores():
                        extra[other] = alone[other].seconds()
            seconds += times
            lonely.append(extra)
            waiting.add(max([others.share(), *(c.lost for c in alone)]))
        slowest = self.slowest(seconds).reshape(-1, len(together))
        found = {c.name: list(slowest[:, i]) for i, c in enumerate(together)}
        for i, candidate in enumerate(alone):
            found[candidate.name] = [extra[i] for extra in lonely]
        return waiting.keep(found)

    def barrier_s(self, count: int, batches: int) -> list[float]:
        """Seconds of a barrier of all processes: one mean of `count` for each batch."""
        with self._communicator() as communicator:
            communicator.barrier_seconds(count)
            times = [communicator.barrier_seconds(count) for _ in range(batches)]
        return [float(seconds) for seconds in self.slowest(times)]

    @contextlib.contextmanager
    def _communicator(self) -> Iterator[Any]:
        """One of its own, for devices that no call has: what is timed is not mixed."""
        cpu = engine.load()
        endpoint = cpu.endpoint()
        text = f"{endpoint.address} {endpoint.token}".encode().ljust(256)
        mine = np.frombuffer(text, np.uint8)
        every = np.asarray(multihost_utils.process_allgather(mine)).astype(np.uint8)
        rows = every.reshape(self.num_processes, -1)
        known = [row.tobytes().decode().split() for row in rows]
        processes = list(range(self.num_processes))
        communicator = cpu.connect(
            endpoint,
            name="bench_barrier",
            devices=[-2 - process for process in processes],
            processes=processes,
            process=jax.process_index(),
            addresses={p: address for p, (address, _) in enumerate(known)},
            tokens={p: int(token) for p, (_, token) in enumerate(known)},
            half_bytes=_PAGE_BYTES,
            timeout_s=60.0,
        )
        try:
            yield communicator
        finally:
            self.meet()  # nobody leaves while another one is in a barrier
            communicator.close()


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Lets the engine compute on every core, as it does in a process that is alone."""
    cpu = engine.load()
    before = cpu.num_threads(), cpu.part_of_cores()
    cpu.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        cpu.set_num_threads(*before)
