"""Runs a command of jax_ub in several processes, each of which does a part of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from jax_ub.launch.environment import LaunchError, check_counts

_STDERR = 2  # the descriptor: sys.stderr may be an object without one


def run_parts(
    arguments: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int,
    folder: str,
    prints_aside: bool = False,
) -> int:
    """Runs `python -m jax_ub ARGUMENTS` in several processes, under `launch`.

    Args:
        arguments: the command, and what tells it that it is one of several.
        num_processes: how many.
        devices_per_process: CPU devices of each, or GPUs.
        folder: what they write to. If this process is killed, the launcher ends the
            processes and removes the folder.
        prints_aside: whether what they print goes to stderr, since it is no part of
            this process's report.

    Returns:
        The launcher's exit status: that of the first process that failed, or 0.
    """
    launch = ["launch", "-n", str(num_processes)]
    launch += ["--devices-per-process", str(devices_per_process)]
    launch += ["--parent", str(os.getpid()), "--parent-folder", folder]
    command = [sys.executable, "-m", "jax_ub", *launch, "-m", "jax_ub", *arguments]
    stdout = _STDERR if prints_aside else None
    return _run_passing_sigterm_on(command, stdout)


def _run_passing_sigterm_on(command, stdout):
    """Lets SIGTERM end the launcher, then this process: its folder for the parts goes.

    The handler raises nothing: amid the launcher's start, that would leave it behind.
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
    """How many devices a process has: one, where nothing was asked for.

    Raises:
        LaunchError: if something was, but the command starts no processes; and for
            more than a machine can run.
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
    """Ends a process whose part fails, so that the launcher ends the others.

    JAX would let it wait at its exit, for minutes, until the others end, too; and they
    may wait for it, in collectives of JAX.
    """
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
