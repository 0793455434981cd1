"""Times calls of several programs in interleaved rounds, and summarizes the times.

Slow phases of the machine then affect all programs, not only one.
"""

import contextlib
import dataclasses
import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_ub._src.dtypes import SHORT_NAMES
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.command_line import load_extra

Values = Sequence[float] | np.ndarray
# Name of a lower bound in tables: the time that the CPU takes for the same FLOPs at its
# peak rate. The peak rate is measured with operands in the L1 cache.
PEAK = "peak"
# Duration of one measurement of the peak rate. A thread takes a twentieth of this time
# to wake up, which hardly affects the rate.
_PEAK_DURATION_S = 0.005
# `fastest` times each variant once, and drops the variants that take more than this
# many times as long as the fastest one.
_MAX_SLOWDOWN = 1.5
# A benchmark round is calm if other processes use at most this share of the CPU.
_CALM = 0.05
# The shortest interval over which the CPU load is measured. The kernel counts CPU time
# in ticks of 10 ms, which would make shorter measurements inexact.
_MIN_INTERVAL_S = 0.1


@dataclasses.dataclass(eq=False)
class Candidate:
    """A program to time, with its operands. All candidates compute the same result.

    Attributes:
        name: column of the table that shows it.
        variant: the key of this variant of the program, if several were tried.
        carry: index of a donated operand, which the result replaces after each call.
        lost: share of the machine's peak rate that was missing in the last call; only
            `PeakCandidate` sets it.
    """

    name: str
    program: Any
    operands: list[Any]
    variant: Any = None
    carry: int | None = None
    lost: float = 0.0

    def __call__(self) -> Any:
        result = jax.block_until_ready(self.program(*self.operands))
        if self.carry is not None:
            self.operands[self.carry] = result
        return result

    def seconds(self) -> float:
        """Runs the program once; returns the seconds, which include its dispatch."""
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


# The highest peak rate that this process has measured for each dtype, in GFLOP/s. A
# later measurement is lower if another process uses the cores or the clock is slower.
_best_rates: dict[str, float] = {}


@dataclasses.dataclass(eq=False)
class PeakCandidate(Candidate):
    """Times `flops` operations at the CPU's peak rate, a lower bound for all programs.

    Each timed call measures the peak rate again, on tiles that stay in the L1 cache.
    """

    flops: int = 0

    def seconds(self) -> float:
        rate, dtype = self(), self.operands[0]
        _best_rates[dtype] = max(rate, _best_rates.get(dtype, rate))
        self.lost = 1 - rate / _best_rates[dtype]
        return self.flops / rate / 1e9


def peak_candidates(platform: str, dtype: str, flops: int) -> list[Candidate]:
    """Returns a list with a `PeakCandidate`, whose time no program can beat.

    The list is empty on GPUs, whose peak rate is not measured, and if `flops` is 0.
    """
    if platform != "cpu" or not flops:
        return []
    operands = [SHORT_NAMES[dtype], _PEAK_DURATION_S]
    measure = cpu_engine.load().peak_gflops
    return [PeakCandidate(PEAK, measure, operands, flops=flops)]


@contextlib.contextmanager
def engine_threads(num_threads: int) -> Iterator[None]:
    """Sets the CPU engine's number of threads within a `with` block.

    Inside the block, the threads may run on all cores, even if this process otherwise
    uses only its share of them.
    """
    cpu = cpu_engine.load()
    before = cpu.num_threads(), cpu.cpu_set()
    cpu.set_num_threads(num_threads)
    try:
        yield
    finally:
        cpu.set_num_threads(*before)


@dataclasses.dataclass(frozen=True)
class WithThreads:
    """A program that is timed with `num_threads` threads of the CPU engine."""

    name: str
    candidate: Candidate
    num_threads: int

    @property
    def lost(self) -> float:
        return self.candidate.lost

    def seconds(self) -> float:
        with engine_threads(self.num_threads):
            # The first call is not timed, because threads of the previous program may
            # still be spinning.
            self.candidate()
            return self.candidate.seconds()


class BackgroundLoad:
    """Measures which share of the machine's CPU time other processes use.

    On a busy machine, a peer with many threads gets more CPU time than jax_ub's engine,
    which has one thread per core. Interleaving does not correct for this. Without
    psutil, the share is 0. `own_seconds` returns the CPU seconds of the benchmark.
    """

    def __init__(self, own_seconds: Callable[[], float] = time.process_time):
        self._own_seconds = own_seconds
        try:
            self._psutil = load_extra("psutil", "bench")
            self._psutil.cpu_percent()  # starts the first interval
        except UnsupportedOverlapError:
            self._psutil = None
        self._start, self._own = time.perf_counter(), own_seconds()
        self._share = 0.0

    def share(self) -> float:
        """Returns the CPU share of other processes in the last 0.1 s or more."""
        now, own = time.perf_counter(), self._own_seconds()
        elapsed = now - self._start
        if self._psutil is not None and elapsed >= _MIN_INTERVAL_S:
            busy = self._psutil.cpu_percent() / 100
            others = busy - (own - self._own) / (elapsed * (os.cpu_count() or 1))
            self._share = min(1.0, max(0.0, others))
            self._start, self._own = now, own
        return self._share


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The seconds that each program took in the calmest rounds of a benchmark.

    `elsewhere` is the largest CPU share of other processes in a kept round.
    """

    seconds: dict[str, list[float]]
    elsewhere: float


# All benchmark cases share one measurement of the load, because it takes at least
# 0.1 s, and the rounds of a case may be shorter.
_background_load = functools.cache(BackgroundLoad)


class Timer:
    """Times programs in this process. A subclass may time them in several processes.

    `num_trials` is the number of rounds in which `fastest` times the variants.
    """

    num_trials = 4

    def interleave(
        self, candidates: Sequence[Any], rounds: int, patience: int = 1
    ) -> Rounds:
        """Times every program once per round, in a random order that differs by round.

        So no program always follows the same one, which may affect caches, clock
        frequency and threads. Of at most `rounds * patience` rounds, the calmest
        `rounds` are kept.
        """
        seconds: dict[str, list[float]] = {each.name: [] for each in candidates}
        shares: list[float] = []
        most = rounds * patience
        while len(shares) < most and sum(s <= _CALM for s in shares) < rounds:
            order = random.Random(len(shares))
            for candidate in order.sample(candidates, len(candidates)):
                seconds[candidate.name].append(self._seconds(candidate))
            shares.append(self._share(candidates))
        kept = sorted(range(len(shares)), key=shares.__getitem__)[:rounds]
        times = {name: [every[i] for i in kept] for name, every in seconds.items()}
        return Rounds(times, shares[kept[-1]])

    def fastest(self, variants: Sequence[Candidate]) -> Candidate:
        """Times several variants of a program, and returns the fastest one."""
        if len(variants) == 1:
            return variants[0]
        for variant in variants:
            variant()
        numbered = [dataclasses.replace(v, name=str(i)) for i, v in enumerate(variants)]
        first = {name: s[0] for name, s in self.interleave(numbered, 1).seconds.items()}
        bound = _MAX_SLOWDOWN * min(first.values())
        quick = [v for v in numbered if first[v.name] <= bound]
        times = self.interleave(quick, self.num_trials).seconds
        return variants[int(min(times, key=lambda name: min(times[name])))]

    def _seconds(self, candidate: Any) -> float:
        return candidate.seconds()

    @functools.cached_property
    def _load(self) -> BackgroundLoad:
        return _background_load()

    def _share(self, candidates: Sequence[Any]) -> float:
        """Returns the share of the CPU, 0 to 1, that other programs took in a round."""
        return max([self._load.share(), *(c.lost for c in candidates)])


interleave = Timer().interleave


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median, relative interquartile range, and best of a series of measurements.

    `spread` is the interquartile range divided by the median.
    """

    median: float
    spread: float
    best: float


def summarize(values: Values) -> Summary:
    """Returns median, spread and minimum of a series of times."""
    low, median, high = map(float, np.percentile(values, (25, 50, 75)))
    return Summary(median, (high - low) / median, float(np.min(values)))


def ratio(peer: Values, own: Values) -> Summary:
    """Returns median, spread and maximum of `peer / own`, the speed-up in each round.

    A slow phase of the machine affects both times of a round, so that the median of the
    quotients is more stable than the quotient of the medians.
    """
    quotients = np.divide(peer, own).tolist()
    return dataclasses.replace(summarize(quotients), best=max(quotients))
