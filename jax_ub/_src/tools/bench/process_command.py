"""`python -m jax_ub bench --processes 2,4`: starts jobs and prints their results."""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jax_ub as ub
from jax_ub._src import lowering_log
from jax_ub._src.errors import UbError
from jax_ub._src.files import write_json
from jax_ub._src.tools.bench import goals, process_cases, record, table
from jax_ub._src.tools.bench.devices import AXIS
from jax_ub._src.tools.bench.job import Job
from jax_ub._src.tools.bench.process_cases import Bench, capacity
from jax_ub._src.tools.bench.results import Result
from jax_ub._src.tools.bench.workloads import Shape
from jax_ub._src.tools.launch.parts import exit_on_failure, run_parts

_OPS = (*process_cases.OPS, "latency", "barrier")


class JobError(UbError, RuntimeError):
    """Raised when a process of a multi-process benchmark fails.

    Also raised if none of the chosen ops can run in several processes.
    """


def options(
    given: argparse.Namespace, dtypes, shapes, times: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the options of a benchmark job, which its processes get as JSON.

    Args:
        given: the parsed command line.
        dtypes: dtypes of the operands.
        shapes: shapes of the column linears.
        times: the numbers "rounds" and "patience".

    Raises:
        JobError: if none of the chosen ops can run in several processes.
    """
    ops = [op for op in _OPS if given.ops is None or op in given.ops]
    if not ops:
        raise JobError(
            f"bench: none of {', '.join(given.ops)} is compared over processes. Take "
            f"some of {', '.join(_OPS)}."
        )
    return {
        "ops": ops,
        "dtypes": list(dtypes),
        "shapes": [[shape.M, shape.K, shape.N] for shape in shapes],
        **times,
        "method": given.method,
    }


def run(numbers: Sequence[int], told: dict[str, Any], path: pathlib.Path | None) -> int:
    """Runs a job for each number of processes in turn, and prints the results.

    Args:
        numbers: the numbers of processes.
        told: the options of the jobs, see `options`.
        path: the JSON file for all figures, or None.

    Raises:
        JobError: if a process failed.
    """
    documents = [_job(number, told) for number in numbers]
    results = [Result.from_json(r) for d in documents for r in d["results"]]
    verdicts = goals.judge(results)
    lines = [documents[0]["about"], "", table.process_head()]
    lines += [table.process_line(result) for result in results]
    if verdicts:
        lines += ["", "Goals", "", *table.verdict_table(verdicts)]
    disturbed = table.disturbed(results)
    if disturbed:
        lines += ["", table.DISTURBED, "", *disturbed]
    fallbacks = dict.fromkeys(text for d in documents for text in d["fallbacks"])
    if fallbacks:
        lines += ["", "NOT overlapped, run as plain jax.lax", "", *fallbacks]
    print("\n".join(lines))
    if path is not None:
        found = {
            "schema": 1,
            **documents[0]["record"],
            "options": told,
            "results": [result for d in documents for result in d["results"]],
            "verdicts": [goals.as_json(verdict) for verdict in verdicts],
            "fallbacks": list(fallbacks),
        }
        write_json(path, found)
    return 0


def _job(number, told):
    """Runs a benchmark job of `number` processes, and returns its JSON document."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "found.json")
        part = json.dumps({**told, "path": str(path)})
        # Each process has as many devices as there are ranks, because process 0 also
        # runs every op on its own devices alone.
        status = run_parts(
            ["bench", "--part", part],
            num_processes=number,
            devices_per_process=number,
            folder=folder,
            prints_aside=True,
        )
        if status:
            raise JobError(
                f"bench: {number} processes failed with exit status {status}; what "
                "they wrote says why."
            )
        return json.loads(path.read_text())


def part(text: str) -> int:
    """Runs the benchmark in one process of a job; `text` has the job's options as JSON.

    The launcher starts each process with `bench --part TEXT`.
    """
    with exit_on_failure():
        _take_part(json.loads(text))
    return 0


def _take_part(told):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize()
    shapes = [Shape(*sizes) for sizes in told["shapes"]]
    job = Job()
    ub.initialize_ub(
        capacity(shapes), job.num_processes, mesh=job.ranks.mesh, axis_name=AXIS
    )
    about = record.record()
    results = []
    bench = Bench(job, told["method"], told["rounds"], told["patience"])
    for result in _measure(bench, told, shapes):
        results.append(result.as_json())
        if job.is_first:
            print(table.process_line(result), flush=True)
    if job.is_first:
        document = {
            "record": about,
            "about": _describe(about, told),
            "results": results,
            "fallbacks": [f"{f.label}: {f.reason}" for f in lowering_log.fallbacks()],
        }
        pathlib.Path(told["path"]).write_text(json.dumps(document))
    job.meet()
    ub.destroy_ub()


def _measure(bench, told, shapes):
    for op in told["ops"]:
        if op == "barrier":
            yield bench.barrier()
        elif op == "latency":
            yield bench.latency()
        else:
            for dtype in told["dtypes"]:
                for shape in shapes:
                    yield bench.forward(op, dtype, shape)


def _describe(about, told):
    machine, versions = about["machine"], about["versions"]
    return (
        f"jax_ub bench in several processes, {about['date']}, commit "
        f"{about['commit']}, jax {versions['jax']}, gloo\n{machine['processor']}, "
        f"{machine['cores']} cores, load {machine['load_average']:.1f}; method "
        f'"{told["method"]}", {told["rounds"]} rounds, the slowest process of each'
    )
