"""Implements `--threads`: times the same calls with several thread counts."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from jax_ub._src.runtime import cpu_engine
from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Case
from jax_ub._src.tools.bench.results import Result, each_call, evaluate
from jax_ub._src.tools.bench.statistics import ratio
from jax_ub._src.tools.bench.timing import Candidate, Rounds

# The names of jax_ub's programs. A case of chained calls has two: the chain and a
# single call.
_OWN = (cases.OWN, f"{cases.OWN}_once")


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores the engine's number of threads and its cores at the end of the block."""
    cpu = cpu_engine.load()
    before = cpu.num_threads(), cpu.part_of_cores()
    try:
        yield
    finally:
        cpu.set_num_threads(*before)


def candidates(case: Case, counts: Sequence[int]) -> list[Candidate]:
    """Returns a case's candidates, with a copy of jax_ub's program per thread count.

    All other candidates run with the first count. They include limits that the engine
    computes, which must stay comparable between the counts.
    """
    first, *others = counts
    found = [dataclasses.replace(c, threads=first) for c in case.candidates]
    own = [c for c in case.candidates if c.name in _OWN]
    found += [
        dataclasses.replace(c, name=_name(c.name, count), threads=count)
        for count in others
        for c in own
    ]
    return found


def evaluate_each(case: Case, rounds: Rounds, counts: Sequence[int]) -> list[Result]:
    """Returns a result for each thread count, relative to the first count."""
    every = [_with_count(rounds.seconds, count) for count in counts[1:]]
    every.insert(0, {name: s for name, s in rounds.seconds.items() if "@" not in name})
    own = [each_call(case, seconds)[cases.OWN] for seconds in every]
    return [
        dataclasses.replace(
            evaluate(case, Rounds(seconds, rounds.elsewhere)),
            threads=count,
            over_first=ratio(own[i], own[0]),
        )
        for i, (count, seconds) in enumerate(zip(counts, every, strict=True))
    ]


def _name(name, count):
    return f"{name}@{count}"


def _with_count(seconds, count):
    """Returns each program's times, with jax_ub's times taken at `count` threads."""
    found = {name: every for name, every in seconds.items() if "@" not in name}
    for name in _OWN:
        if name in found:
            found[name] = seconds[_name(name, count)]
    return found
