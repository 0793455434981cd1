"""Runs a command of jax_ub in several processes, which compute together as one job.

A part is the command in one of these processes.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence

from jax_ub._src.errors import ConfigurationError, UbError, shown
from jax_ub._src.tools.command_line import positive
from jax_ub._src.tools.launch import supervisor
from jax_ub._src.tools.launch.job import Job

MOST = 4096  # processes or devices, far more than one machine can run


class JobError(UbError, RuntimeError):
    """Raised when a process of a command's multi-process job fails.

    `status` is the exit status of the job.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


def count(text: str) -> int:
    if positive(text) > MOST:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is more than one machine can run. Give at most {MOST}."
        )
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--processes` and related options, which several commands have."""
    add = parser.add_argument
    add("--processes", type=count, default=1, help="run in this many processes")
    devices = "with --processes: CPU devices of each, or GPUs (default: 1)"
    add("--devices-per-process", type=count, metavar="K", help=devices)
    # Internal option, set in each process of a job. For "part.json", process 1 writes
    # its results to "part.1.json".
    add("--part", type=pathlib.Path, help=argparse.SUPPRESS)


def check_options(command: str, given: argparse.Namespace) -> None:
    devices = given.devices_per_process
    if devices is not None and given.processes == 1:
        raise ConfigurationError(
            f"{command}: --devices-per-process {devices} requires several processes. "
            "Add --processes 2."
        )


def part_path(path: pathlib.Path, process: int) -> pathlib.Path:
    """Returns the output file of a process, such as "out.1.json" for "out.json"."""
    return path.with_suffix(f".{process}{path.suffix}")


@contextlib.contextmanager
def parts_of(
    command: str,
    arguments: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int,
    stdout: int | None = None,
) -> Iterator[list[pathlib.Path]]:
    """Runs a command of jax_ub in several processes; yields their result files.

    The block may read the files. If this process gets a signal or is killed, the
    processes end and the folder of the files is removed. `stdout` is an argument of
    `subprocess.Popen`.

    Raises:
        JobError: if a process failed.
    """
    signals = (signal.SIGTERM, signal.SIGHUP)
    with supervisor.handling(_exit, signals), tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "part.json")
        job = Job(num_processes, devices_per_process, folder=folder)
        program = ["-m", "jax_ub", command, "--part", str(path), *arguments]
        status = job.run(program, stdout)
        if status:
            raise JobError(
                f"{command}: {num_processes} processes failed with exit status "
                f"{status}; their output gives the reason.",
                status,
            )
        yield [part_path(path, process) for process in range(num_processes)]


def _exit(number, _):
    raise SystemExit(128 + number)  # removes the folder of the files


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
    """Exits the process at once if the block raises, so that the launcher ends the job.

    At a normal exit, JAX would wait for minutes for the other processes, which may wait
    for this process in a collective.
    """
    try:
        yield
    except Exception as error:  # any error of the program must end the job
        if isinstance(error, UbError):
            sys.stderr.write(f"python -m jax_ub: error: {error}\n")
        else:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
