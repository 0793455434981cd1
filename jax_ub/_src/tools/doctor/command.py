"""Reports what is installed, and what can run or why not: `python -m jax_ub doctor`.

With `--processes`, several processes are started, which also compute together as the
processes of a job do.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile

import jax

from jax_ub._src.runtime import backend
from jax_ub._src.tools.doctor.examination import examine
from jax_ub._src.tools.doctor.finding import Finding, State
from jax_ub._src.tools.launch.parts import devices_of_each, run_parts
from jax_ub._src.tools.options import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `doctor` to its argument parser."""
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead")
    add("--processes", type=positive, default=1, help="look from this many processes")
    add(
        "--devices-per-process",
        type=positive,
        metavar="K",
        help="with --processes: CPU devices of each, or GPUs (default: 1)",
    )
    # Internal: --processes starts each process with --part. The path is its output
    # file; the process index is inserted into the name.
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Runs all checks and prints a line for each finding, or JSON with `--json`.

    Returns:
        1 if there is a fault, else 0.
    """
    if given.part is not None:
        jax.distributed.initialize()
        backend.start()  # fails with a one-line error if JAX cannot start
        _write(_part(given.part, jax.process_index()), list(examine(together=True)))
        return 0
    several = given.processes > 1
    devices = devices_of_each("doctor", given.devices_per_process, given.processes)
    findings = _in_processes(given.processes, devices) if several else list(examine())
    if given.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state.value:>5}  {finding.name:<{width}}  {finding.text}")
    return int(any(finding.state is State.FAULT for finding in findings))


def _in_processes(num_processes: int, devices_per_process: int) -> list[Finding]:
    """Runs the checks in several processes that compute together.

    Returns the findings of process 0, then those of other processes that differ from
    them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "findings.json")
        status = run_parts(
            ["doctor", "--part", str(path)],
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            folder=folder,
            prints_aside=True,
        )
        if status:
            text = f"ended with exit status {status}; what they wrote says why"
            return [Finding(f"{num_processes} processes", State.FAULT, text)]
        first, *others = (_read(_part(path, i)) for i in range(num_processes))
    return first + [
        dataclasses.replace(finding, name=f"process {index}: {finding.name}")
        for index, found in enumerate(others, start=1)
        for finding in found
        if finding not in first
    ]


def _part(path, process):
    return path.with_suffix(f".{process}.json")


def _write(path, findings):
    path.write_text(json.dumps([finding.as_json() for finding in findings]))


def _read(path):
    return [Finding.from_json(found) for found in json.loads(path.read_text())]
