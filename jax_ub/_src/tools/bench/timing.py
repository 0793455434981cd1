"""Times calls of several programs in interleaved rounds.

Slow phases of the machine then affect all programs, not only one.
"""

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import jax

from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.bench.background_load import BackgroundLoad

# Candidates this many times slower than the fastest after one call are dropped.
_HOPELESS = 1.5
# Number of timed rounds in which `fastest` compares the candidates that remain.
_TRIALS = 4
# A round is calm if the CPU share of other processes does not exceed this.
_CALM = 0.05


@dataclasses.dataclass
class Candidate:
    """A program to time, with its operands; several candidates compute the same result.

    Attributes:
        name: column of the table that shows it.
        program: a jitted or other function of the operands.
        operands: arguments of each call.
        way: describes how the program is written, if variants were tried.
        carry: index of a donated operand, which the result replaces after each call;
            None if no operand is donated.
        lost: share of the machine's peak that was missing in the last timed call; only
            `peak.AtPeak` sets it.
        threads: number of threads for the engine; None leaves it unchanged.
    """

    name: str
    program: Any
    operands: list[Any]
    way: str = ""
    carry: int | None = None
    lost: float = 0.0
    threads: int | None = None

    def __call__(self) -> Any:
        """Runs the program once with the operands; waits for and returns its result."""
        result = jax.block_until_ready(self.program(*self.operands))
        if self.carry is not None:
            self.operands[self.carry] = result
        return result

    def seconds(self) -> float:
        """Runs the program once and returns the seconds, including its dispatch."""
        if self.threads is not None:
            # Threads of the previous count may still be spinning, so warm up first.
            cpu_engine.load().set_num_threads(self.threads)
            self()
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The seconds of every candidate in each kept round, and the background load."""

    seconds: dict[str, list[float]]
    elsewhere: float  # the largest CPU share of other processes in a kept round


class RoundSelector:
    """Decides how many rounds to run, and keeps those with least background load."""

    def __init__(self, rounds: int, patience: int):
        """Sets how many rounds are kept, and how many are run at most.

        It keeps `rounds` rounds and runs at most `rounds * patience`.
        """
        self._rounds, self._most = rounds, rounds * patience
        self._shares: list[float] = []

    def add(self, share: float) -> None:
        """Records that a round was run; other processes used `share` of the CPU."""
        self._shares.append(share)

    @property
    def num_rounds(self) -> int:
        """Returns the number of rounds that were run so far."""
        return len(self._shares)

    @property
    def is_over(self) -> bool:
        """Returns whether enough rounds were calm or the maximum was reached.

        A round is calm if other processes used at most 5 % of the CPU.
        """
        calm = sum(share <= _CALM for share in self._shares)
        return calm >= self._rounds or self.num_rounds >= self._most

    def keep(self, seconds: dict[str, list[float]]) -> Rounds:
        """Returns the times of the rounds with the least background load.

        `seconds` has the times of all rounds, by candidate.
        """
        numbers = sorted(range(self.num_rounds), key=self._shares.__getitem__)
        kept = numbers[: self._rounds]
        return Rounds(
            {name: [every[i] for i in kept] for name, every in seconds.items()},
            self._shares[kept[-1]],
        )


def interleave(
    candidates: Sequence[Candidate], rounds: int, patience: int = 1
) -> Rounds:
    """Times every candidate once per round, in a different random order in each round.

    The order is seeded by the round's number. No candidate always follows the same one
    and its effects on caches, clock frequency and threads.

    Args:
        candidates: the programs to time.
        rounds: the number of rounds to keep.
        patience: at most `patience * rounds` rounds are run to find calm ones.
    """
    others = BackgroundLoad()
    waiting = RoundSelector(rounds, patience)
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    while not waiting.is_over:
        number = waiting.num_rounds
        for candidate in random.Random(number).sample(candidates, len(candidates)):
            seconds[candidate.name].append(candidate.seconds())
        waiting.add(max([others.share(), *(c.lost for c in candidates)]))
    return waiting.keep(seconds)


def fastest(ways: Sequence[Candidate]) -> Candidate:
    """Returns the fastest of several variants of a program.

    Each variant is called once to compile and once to drop slow ones. The rest is timed
    interleaved. Of equally fast variants, the first is returned.
    """
    if len(ways) == 1:
        return ways[0]
    for way in ways:
        way()
    first = [way.seconds() for way in ways]
    bound = _HOPELESS * min(first)
    hopeful = [w for w, seconds in zip(ways, first, strict=True) if seconds <= bound]
    renamed = [
        dataclasses.replace(way, name=str(index)) for index, way in enumerate(hopeful)
    ]
    times = interleave(renamed, _TRIALS).seconds
    return min(zip(hopeful, times.values(), strict=True), key=lambda p: min(p[1]))[0]
