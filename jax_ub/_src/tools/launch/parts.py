"""Runs a command of jax_ub in several processes, which compute together as one job.

A part is the command in one of these processes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from jax_ub._src.tools.launch.environment import LaunchError, check_counts

_STDERR = 2  # file descriptor, because sys.stderr may be an object without one


def run_parts(
    arguments: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int,
    folder: str,
    prints_aside: bool = False,
) -> int:
    """Runs `python -m jax_ub ARGUMENTS` in several processes, by `jax_ub launch`.

    Args:
        arguments: command and options, including the one that marks it as a part.
        num_processes: number of processes.
        devices_per_process: number of CPU devices or GPUs of each process.
        folder: folder that the processes write to. If this process is killed, the
            launcher ends the processes and removes the folder.
        prints_aside: whether the processes' stdout is redirected to stderr, because it
            is not part of this command's output.

    Returns:
        The launcher's exit status: 0, or that of the first process that failed.
    """
    launch = ["launch", "-n", str(num_processes)]
    launch += ["--devices-per-process", str(devices_per_process)]
    launch += ["--parent", str(os.getpid()), "--parent-folder", folder]
    command = [sys.executable, "-m", "jax_ub", *launch, "-m", "jax_ub", *arguments]
    stdout = _STDERR if prints_aside else None
    return _run_passing_sigterm_on(command, stdout)


def _run_passing_sigterm_on(command, stdout):
    """Runs the launcher as a subprocess and returns its exit status.

    SIGTERM ends the launcher first, then this process, with cleanup. The signal handler
    does not raise. An exception while the launcher is being started would leave it
    running.
    """
    process: subprocess.Popen | None = None
    is_explicit = threading.Event()

    def end(*_):
        is_explicit.set()
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, end)
    try:
        with subprocess.Popen(command, stdout=stdout) as process:
            if is_explicit.is_set():
                process.terminate()
            try:
                status = process.wait()
            except BaseException:  # Ctrl-C
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_explicit.is_set():
        raise SystemExit(128 + signal.SIGTERM)
    return status


def devices_of_each(command: str, asked: int | None, num_processes: int) -> int:
    """Returns the devices per process that the user requested for a command, or 1.

    Raises:
        LaunchError: if a number was requested but the command starts no processes, or
            if it is larger than one machine can run.
    """
    if asked is not None and num_processes == 1:
        raise LaunchError(
            f"{command}: --devices-per-process {asked} is of several processes. Add "
            "--processes 2."
        )
    check_counts(command, num_processes, asked or 1)
    return asked or 1


@contextlib.contextmanager
def exit_on_failure() -> Iterator[None]:
    """Exits the process immediately if the block raises, after printing the error.

    The launcher then ends the other processes. Otherwise JAX waits at exit for minutes
    until the other processes exit, while they may wait for this process in a
    collective.
    """
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
