#!/usr/bin/env python3
"""Compares the speed of two builds of jax_ub in interleaved runs.

    python tests/bench/ab.py BEFORE AFTER

BEFORE and AFTER are checkouts, each with jax_ub installed in its `.venv`. Each build
has a process, and the two take turns call by call, so that the load of the machine
affects both equally. Only public functions are called: the internals may differ.

A ratio is time(BEFORE) / time(AFTER) of one round; above 1, AFTER is faster. In each
round, each build runs each case once untimed and then three times, of which the fastest
counts. The table has the median ratio of all rounds, as the geometric mean over the
shapes, and the interquartile range. The exit status is 1 if the geometric mean of all
cases is below `--least`.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SHAPES = "1536x1280x3840,512x1024x2816,1024x1024x1536,64x1024x2816"
NUM_TIMED = 3

Case = tuple[str, str, int, str]  # op, dtype, number of ranks, shape


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for op in options.ops.split(","):
        for dtype in options.dtypes.split(","):
            for num_ranks in map(int, options.ranks.split(",")):
                for shape in options.shapes.split(","):
                    yield op, dtype, num_ranks, shape


def compile_case(jax, ub, case: Case):
    """Returns the compiled program of a case and its operands."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    op, dtype, num_ranks, shape = case
    m, k, n = map(int, shape.split("x"))
    rows, columns = PartitionSpec("tp", None), PartitionSpec(None, "tp")
    sizes = (m, k), (k, n)
    if op == "all_gather_matmul":
        specs, result = (rows, columns), columns
    elif op == "all_reduce":
        sizes = ((m, k),)
        specs, result = (columns,), PartitionSpec()
    else:
        sizes = (m, n), (n, k)  # the row-parallel layer after the column-parallel one
        specs = (columns, rows)
        result = rows if op == "matmul_reduce_scatter" else PartitionSpec()
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("tp",))
    normal = np.random.default_rng(0).standard_normal
    operands = [
        jax.device_put(jax.numpy.asarray(normal(size), dtype), NamedSharding(mesh, s))
        for size, s in zip(sizes, specs, strict=True)
    ]

    def run(*operands):
        return getattr(ub, op)(*operands, axis_name="tp")

    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=result)
    lowered = jax.jit(sharded).lower(*operands)
    if f"jax_ub${op}" not in lowered.as_text():
        sys.exit(f"ab.py: {op} in {dtype} on {num_ranks} ranks is not overlapped")
    return lowered.compile(), operands


def serve(options: argparse.Namespace) -> None:
    """Compiles all cases, then times those whose numbers are read from stdin."""
    most = max(map(int, options.ranks.split(",")))
    os.environ.setdefault("NPROC", str(4 * most))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", most)
    import jax_ub as ub

    answers, sys.stdout = sys.stdout, sys.stderr
    programs = [compile_case(jax, ub, case) for case in cases(options)]
    print(ub.__file__, file=answers, flush=True)
    for line in sys.stdin:
        program, operands = programs[int(line)]
        seconds = []
        for _ in range(1 + NUM_TIMED):
            begin = time.perf_counter()
            jax.block_until_ready(program(*operands))
            seconds.append(time.perf_counter() - begin)
        print(min(seconds[1:]), file=answers, flush=True)


class Build:
    """A process that times the cases with one build."""

    def __init__(self, checkout: pathlib.Path, options: argparse.Namespace):
        python = checkout.resolve() / ".venv/bin/python"
        arguments = [
            python,
            __file__,
            "--serve",
            json.dumps(vars(options), default=str),
        ]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read_line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"ab.py: a process exited with status {self._process.wait()}")
        return line.strip()

    def time_s(self, index: int) -> float:
        print(index, file=self._process.stdin, flush=True)
        return float(self.read_line())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def report(every: list[Case], ratios: list[list[float]]) -> float:
    """Prints a table; returns the geometric mean of all cases."""
    groups = collections.defaultdict(list)
    for case, found in zip(every, ratios, strict=True):
        low, median, high = statistics.quantiles(found, n=4)
        groups[case[:3]].append((median, high - low))
    print(f"{'op':24} {'dtype':9} {'ranks':>5} {'ratio':>7} {'iqr':>6}")
    for (op, dtype, num_ranks), found in groups.items():
        medians, spreads = zip(*found, strict=True)
        ratio, spread = statistics.geometric_mean(medians), statistics.mean(spreads)
        print(f"{op:24} {dtype:9} {num_ranks:5} {ratio:7.3f} {spread:6.3f}")
    mean = statistics.geometric_mean(m for found in groups.values() for m, _ in found)
    print(f"{'all':24} {'':9} {'':5} {mean:7.3f}", flush=True)
    return mean


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("before", type=pathlib.Path, help="a checkout with a .venv")
    add("after", type=pathlib.Path, help="a checkout with a .venv")
    add("--ops", default=",".join(OPS), help="or all_reduce; default: %(default)s")
    add("--dtypes", default="bfloat16,float32", help="default: %(default)s")
    add("--ranks", default="2,4,8", help="numbers of ranks; default: %(default)s")
    add("--shapes", default=SHAPES, metavar="MxKxN,...", help="default: %(default)s")
    add("--rounds", type=int, default=15, help="of each pair; default: %(default)s")
    add("--pairs", type=int, default=3, help="of new processes; default: %(default)s")
    add("--least", type=float, default=0.99, help="default: %(default)s")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds} is too small: give at least 2")
    return options


def main() -> int:
    options = parse_options()
    every = list(cases(options))
    ratios: list[list[float]] = [[] for _ in every]
    mean = 0.0
    for pair in range(options.pairs):
        builds = [Build(path, options) for path in (options.before, options.after)]
        before, after = (build.read_line() for build in builds)
        for round_number in range(options.rounds):
            order = random.Random(round_number).sample(range(len(every)), len(every))
            for index in order:
                # The build that runs first alternates.
                turns = builds if (round_number + index) % 2 else builds[::-1]
                seconds = {build: build.time_s(index) for build in turns}
                ratios[index].append(seconds[builds[0]] / seconds[builds[1]])
        for build in builds:
            build.close()
        print(f"\nafter pair {pair + 1} of {options.pairs}: {before} / {after}")
        mean = report(every, ratios)
    return 0 if mean >= options.least else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(argparse.Namespace(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
