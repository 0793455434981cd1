"""Runs programs in turn and times each call."""

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import jax

from jax_ub.bench.background_load import BackgroundLoad
from jax_ub.runtime import engine

# A way that is this much slower than the best one after a single call is not tried on.
_HOPELESS = 1.5
# The rounds of the others.
_TRIALS = 4
# A round is disturbed where others had more of the machine than this.
_CALM = 0.05


@dataclasses.dataclass
class Candidate:
    """One program of a comparison, with the operands that it is called with.

    Attributes:
        name: the column in which it is shown.
        program: a jitted function of the operands, or any other function.
        operands: what it is called with.
        way: how it is written, where there was a choice.
        carry: the operand that the result replaces after each call, because the program
            takes it donated; None for the usual program.
        lost: the part of the machine's speed that was missing in the last timed call,
            of a program that can tell.
        threads: how many threads the engine may compute with, or None to leave that
            as it is.
    """

    name: str
    program: Any
    operands: list[Any]
    way: str = ""
    carry: int | None = None
    lost: float = 0.0
    threads: int | None = None

    def __call__(self) -> Any:
        """Runs the program once and waits for its result."""
        result = jax.block_until_ready(self.program(*self.operands))
        if self.carry is not None:
            self.operands[self.carry] = result
        return result

    def seconds(self) -> float:
        """Times one call, dispatch included."""
        if self.threads is not None:
            # The threads of another count may still be spinning: one call goes first.
            engine.load().set_num_threads(self.threads)
            self()
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The seconds of every candidate in each round, and who else was computing."""

    seconds: dict[str, list[float]]
    elsewhere: float  # the largest part of the machine that others had in one round


class RoundSelector:
    """Decides how many rounds are run, and which are kept: the calmest."""

    def __init__(self, rounds: int, patience: int):
        """Keeps `rounds` of at most `patience` times as many."""
        self._rounds, self._most = rounds, rounds * patience
        self._shares: list[float] = []

    def add(self, share: float) -> None:
        """Takes note of a round, and of the part of the machine that others had."""
        self._shares.append(share)

    @property
    def num_rounds(self) -> int:
        """How many were run."""
        return len(self._shares)

    @property
    def is_over(self) -> bool:
        """Whether there are enough calm rounds, or no more to be run."""
        calm = sum(share <= _CALM for share in self._shares)
        return calm >= self._rounds or self.num_rounds >= self._most

    def keep(self, seconds: dict[str, list[float]]) -> Rounds:
        """The calmest rounds, of the seconds of every candidate in all of them."""
        numbers = sorted(range(self.num_rounds), key=self._shares.__getitem__)
        kept = numbers[: self._rounds]
        return Rounds(
            {name: [every[i] for i in kept] for name, every in seconds.items()},
            self._shares[kept[-1]],
        )


def interleave(
    candidates: Sequence[Candidate], rounds: int, patience: int = 1
) -> Rounds:
    """Times every candidate once in each round.

    Each round has an order of its own, the same in every run, so that none always meets
    the caches, the clock frequency or the spinning threads of the same neighbour.

    Args:
        candidates: what is timed.
        rounds: how many rounds are kept.
        patience: how many times as many rounds are run at most, to find calm ones.
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
    """Finds the fastest of several ways to write the same program.

    The order in which they are named decides between equals. Each is called once to
    compile and once to see whether it is hopeless; the rest run interleaved.
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
