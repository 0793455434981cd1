"""Runs programs in turn and times each call."""

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import jax

# A way that is this much slower than the best one after a single call is not tried on.
_HOPELESS = 1.5


@dataclasses.dataclass
class Contender:
    """One program of a comparison, with the operands that it is called with.

    Attributes:
        name: the column in which it is shown.
        program: a jitted function of the operands, or any other function.
        operands: what it is called with.
        way: how it is written, where there was a choice.
        carry: the operand that the result replaces after each call, because the program
            takes it donated; None for the usual program.
    """

    name: str
    program: Any
    operands: list[Any]
    way: str = ""
    carry: int | None = None

    def __call__(self) -> Any:
        """Runs the program once and waits for its result."""
        result = jax.block_until_ready(self.program(*self.operands))
        if self.carry is not None:
            self.operands[self.carry] = result
        return result

    def seconds(self) -> float:
        """Times one call, dispatch included."""
        start = time.perf_counter()
        self()
        return time.perf_counter() - start


def interleave(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Times every contender once in each round.

    Each round has an order of its own, the same in every run, so that none always meets
    the caches, the clock frequency or the spinning threads of the same neighbour.

    Returns:
        The seconds of each round, by the contender's name.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in random.Random(number).sample(contenders, len(contenders)):
            times[contender.name].append(contender.seconds())
    return times


def fastest(ways: Sequence[Contender], rounds: int = 4) -> Contender:
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
    times = interleave(renamed, rounds)
    return min(zip(hopeful, times.values(), strict=True), key=lambda p: min(p[1]))[0]
