"""Reports what is installed, and what can run or why not.

With `--processes`, several processes are started, which also compute together as the
processes of a job do.
"""

import argparse
import dataclasses
import pickle

import jax

from jax_ub._src.runtime import backend
from jax_ub._src.tables import format_table
from jax_ub._src.tools import console
from jax_ub._src.tools.doctor.checks import Finding, State, examine
from jax_ub._src.tools.launch import parts

EXAMPLE = "doctor --processes 2"
_COLORS = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    console.add_json(parser, "all findings")
    parts.add_arguments(parser)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints a line for each finding; returns 1 if there is a fault, else 0."""
    parts.check_options("doctor", given)
    if given.part is not None:
        jax.distributed.initialize()
        backend.start()  # fails with a one-line error if JAX cannot start
        found = list(examine(together=True))
        path = parts.part_path(given.part, jax.process_index())
        path.write_bytes(pickle.dumps(found))
        return 0
    findings = _in_processes(given) if given.processes > 1 else list(examine())
    rows = [(f.state.value, f.name, f.text) for f in findings]
    for finding, line in zip(findings, format_table((), rows, right=(0,)), strict=True):
        state = finding.state.value
        colored = console.colored(state, _COLORS.get(finding.state))
        console.say(given, line.replace(state, colored, 1))
    console.write(given, [finding.as_json() for finding in findings])
    return int(any(finding.state is State.FAULT for finding in findings))


def _in_processes(given) -> list[Finding]:
    """Returns the findings of process 0, then different findings of other processes."""
    try:
        with parts.parts_of(
            "doctor",
            [],
            num_processes=given.processes,
            devices_per_process=given.devices_per_process or 1,
            stdout=console.progress_file(),
        ) as paths:
            first, *others = [pickle.loads(path.read_bytes()) for path in paths]
    except parts.JobError as error:
        return [Finding("processes", State.FAULT, str(error))]
    return first + [
        dataclasses.replace(finding, name=f"process {index}: {finding.name}")
        for index, found in enumerate(others, start=1)
        for finding in found
        if finding not in first
    ]
