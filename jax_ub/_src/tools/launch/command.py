"""Runs one program in several processes on this machine: `python -m jax_ub launch`.

`jax.distributed.initialize()` needs no arguments in these processes. Every output line
is prefixed with the index of its process. When a process fails, the launcher reports
it, ends all others and returns its exit status. Ctrl-C, and any end of the launcher
itself, also end all processes: none is left behind.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

from jax_ub._src.errors import shown
from jax_ub._src.tools.launch import supervisor
from jax_ub._src.tools.launch.environment import LaunchError, check_counts, environment
from jax_ub._src.tools.launch.port import reserve_port

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `launch` to its argument parser."""
    add = parser.add_argument
    add("-n", "--processes", type=int, default=2, metavar="N", help="default 2")
    add(
        "--devices-per-process",
        type=int,
        default=1,
        metavar="K",
        help="CPU devices of a process, or GPUs; default 1",
    )
    add(
        "--hosts",
        type=int,
        default=1,
        metavar="H",
        help="let the processes play this many hosts, which share no memory; default 1",
    )
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end all processes after this time, with exit status 124",
    )
    add(
        "--linger",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long the other processes may go on after one failed, to say what "
        "they saw of it; default 0",
    )
    add(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="from the signal that ends a process to SIGKILL; default 5",
    )
    # Internal, for launchers that `parts.run_parts` starts.
    add("--parent", type=int, help=argparse.SUPPRESS)
    add("--parent-folder", help=argparse.SUPPRESS)
    add("-m", dest="module", action="store_true", help="run a module, not a script")
    add(
        "program",
        nargs=argparse.PARSER,  # includes options and "--" of the program
        metavar="script.py",
        help="or the name of a module, after -m; and its arguments",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs the user's program in all processes of a job until they have exited.

    Returns:
        0 if all processes exited with 0; otherwise the exit status of the first one
        that failed, or 128 + n if signal n ended it; 124 after `--timeout`.

    Raises:
        LaunchError: if the options are invalid.
    """
    _check(given)
    with reserve_port() as port:
        job = {
            "command": _command(given),
            "environments": [
                environment(
                    os.environ,
                    process=process,
                    num_processes=given.processes,
                    devices_per_process=given.devices_per_process,
                    port=port,
                    num_hosts=given.hosts,
                )
                for process in range(given.processes)
            ],
            "timeout_s": given.timeout,
            "linger_s": given.linger,
            "grace_s": given.grace,
        }
        return _supervise(job, given.parent, given.parent_folder)


def _check(given):
    for name in ("processes", "devices_per_process"):
        if getattr(given, name) < 1:
            option = "-n" if name == "processes" else "--devices-per-process"
            raise LaunchError(
                f"launch: {option} {getattr(given, name)}: give at least 1."
            )
    check_counts("launch", given.processes, given.devices_per_process)
    if given.hosts < 1 or given.processes % given.hosts:
        raise LaunchError(
            f"launch: --hosts {given.hosts} cannot share -n {given.processes} "
            "processes equally. Give a divisor of that."
        )
    for name in ("timeout", "linger", "grace"):
        value = getattr(given, name)
        if value is not None and not value >= 0:
            raise LaunchError(f"launch: --{name} {value}: give a number of seconds.")
    program, *_ = _program(given)
    if not given.module and not os.path.exists(program):
        raise LaunchError(
            f"launch: there is no script {shown(program)}. To run a module, put -m "
            "before it."
        )


def _program(given):
    # Before Python 3.13, argparse keeps the "--" that ends the options of launch.
    return given.program[given.program[0] == "--" :]


def _command(given):
    return [sys.executable, *(["-m"] if given.module else []), *_program(given)]


def _supervise(job, parent, parent_folder):
    """Starts the supervisor process, which runs the ranks, and waits for it.

    If the supervisor or this process is killed, the other one ends all ranks. If the
    process `parent` exits, this process ends all ranks and removes `parent_folder`.
    """
    supervisor.adopt_orphans()
    others = supervisor.descendants()
    process = subprocess.Popen(
        # Isolated mode starts fast; the supervisor needs neither jax nor PYTHONPATH.
        [sys.executable, "-I", "-S", supervisor.__file__],
        stdin=subprocess.PIPE,
        # In a new session, so that only this process gets Ctrl-C and forwards it.
        start_new_session=True,
    )
    assert process.stdin is not None
    with _forwarding_signals(process):
        if parent is not None:
            supervisor.signal_at_death_of_parent(signal.SIGTERM)
            if os.getppid() != parent:  # it exited before the call above
                process.terminate()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        # The pipe to the supervisor stays open. When this process exits, even by
        # SIGKILL, the kernel closes the pipe, and the supervisor ends all ranks.
        status = process.wait()
        supervisor.kill_descendants(others)
        if parent_folder is not None and os.getppid() != parent:
            shutil.rmtree(parent_folder, ignore_errors=True)
    if status < 0:
        name = supervisor.signal_name(-status)
        print(f"launch: its supervisor was ended by {name}.", file=sys.stderr)
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _forwarding_signals(process):
    before = {
        number: signal.signal(number, lambda number, _: process.send_signal(number))
        for number in _FORWARDED
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
