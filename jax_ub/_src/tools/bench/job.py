"""Times programs in a job of several processes, where the slowest process counts."""

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.bench.background_load import BackgroundLoad
from jax_ub._src.tools.bench.devices import AXIS, Ranks, Spec
from jax_ub._src.tools.bench.timing import Candidate, Rounds, RoundSelector

# Barriers move no data; this is the smallest buffer of a communicator.
_PAGE_BYTES = 4096
# Rounds of the search for the fastest variant. With two rounds, gloo at 64 rows in bf16
# selected the naive program, which takes 1.5 times as long as the fastest variant.
_TRIALS = 8


@dataclasses.dataclass(frozen=True)
class ProcessMesh(Ranks):
    """A mesh over all processes of the job, with one device of each process."""

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Returns the mesh with one axis, `AXIS`, ordered by process index."""
        first = [jax.local_devices(process)[0] for process in range(self.num_ranks)]
        return Mesh(np.array(first), (AXIS,))

    def place(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """Places a global array, with equal values in all processes, on the mesh."""
        array = np.asarray(array)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )


@dataclasses.dataclass(frozen=True)
class LocalMesh(Ranks):
    """A mesh of `num_ranks` devices of this process, for programs it runs alone."""

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Returns the mesh of this process's devices, with one axis, `AXIS`."""
        return Mesh(np.array(jax.local_devices()[: self.num_ranks]), (AXIS,))


class Job:
    """The processes of a benchmark, which synchronize and combine their measurements.

    Every process creates one and calls the same methods in the same order. Process 0
    also times programs on its own devices while the other processes wait.
    """

    def __init__(self) -> None:
        """Creates the mesh of all processes, and waits until all have created it."""
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
        """Blocks until every process of the job has called it, as a barrier."""
        jax.block_until_ready(self._meet(self._ones))

    def slowest(self, seconds: Sequence[float]) -> np.ndarray:
        """Returns each measurement's maximum over all processes, in seconds.

        `seconds` has the same number of measurements in every process.
        """
        return self._of_all(seconds).max(axis=0)

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds that all processes have used so far, summed."""
        return float(self._of_all([time.process_time()]).sum())

    def _of_all(self, seconds):
        """All-gathers the values of all processes.

        The result has shape [num_processes, len(seconds)].
        """
        mine = np.asarray(seconds, np.float64).view(np.uint32)
        every = np.asarray(multihost_utils.process_allgather(mine))
        each = every.reshape(self.num_processes, -1).astype(np.uint32)
        return np.ascontiguousarray(each).view(np.float64)

    def choice(self, index: int) -> int:
        """Broadcasts `index` from process 0, and returns it in every process."""
        chosen = np.asarray([index], np.int32)
        return int(multihost_utils.broadcast_one_to_all(chosen)[0])

    def fastest(self, ways: Sequence[Candidate]) -> Candidate:
        """Returns the fastest of several variants of a program, in all processes.

        All processes time every variant together. The slowest process counts, and all
        processes return the same variant.
        """
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
        """Times every candidate once per round, in a different random order each.

        Rounds with little background load are kept, as in `timing.interleave`.

        Args:
            together: programs that all processes run; the slowest process counts.
            alone: programs that process 0 runs while the other processes wait.
            rounds: the number of rounds to keep.
            patience: at most `patience * rounds` rounds are run; process 0 decides.
        """
        others = BackgroundLoad(own_seconds=self.cpu_seconds)
        waiting = RoundSelector(rounds, patience)
        seconds: list[float] = []
        lonely: list[list[float]] = []
        while not self.choice(waiting.is_over):
            number = waiting.num_rounds
            times = [0.0] * len(together)
            extra = [1.0] * len(alone)  # only process 0 measures these times
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
        """Returns the seconds that a barrier of all processes takes in the engine.

        The list has the mean of `count` barriers for each of `batches` batches.
        """
        with self._communicator() as communicator:
            communicator.barrier_seconds(count)
            times = [communicator.barrier_seconds(count) for _ in range(batches)]
        return [float(seconds) for seconds in self.slowest(times)]

    @contextlib.contextmanager
    def _communicator(self) -> Iterator[Any]:
        """Opens a communicator of all processes for the time of the block.

        It is separate, so that no other call affects the timing.
        """
        cpu = cpu_engine.load()
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
            self.meet()  # no process may close while another is inside a barrier
            communicator.close()


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Gives the CPU engine the default thread count of one process inside the block.

    In a job of several processes, each one otherwise computes on a part of the cores.
    The previous thread count and cores are restored at the end.
    """
    cpu = cpu_engine.load()
    before = cpu.num_threads(), cpu.part_of_cores()
    cpu.set_num_threads(cpu.default_num_threads())
    try:
        yield
    finally:
        cpu.set_num_threads(*before)
