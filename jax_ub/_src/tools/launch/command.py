"""Runs one program in several processes on this machine.

`jax.distributed.initialize()` needs no arguments in these processes. Every output line
begins with the index of its process. When a process fails, the launcher reports it,
ends all others and returns its exit status. Ctrl-C and the exit of the launcher also
end all processes.
"""

import argparse
from typing import Any

from jax_ub._src.errors import ConfigurationError
from jax_ub._src.tools import command_line
from jax_ub._src.tools.launch.job import Job
from jax_ub._src.tools.launch.parts import count

EXAMPLE = "launch -n 2 --devices-per-process 4 train.py --steps 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    number = "number of processes (default: 2)"
    add("-n", "--processes", type=count, default=2, metavar="N", help=number)
    devices = "CPU devices of a process, or GPUs (default: 1)"
    add("--devices-per-process", type=count, default=1, metavar="K", help=devices)
    hosts = "simulate this many hosts, which share no memory (default: 1)"
    add("--hosts", type=count, default=1, metavar="H", help=hosts)
    times: dict[str, Any] = {"type": command_line.seconds, "metavar": "SECONDS"}
    timeout = "end all processes after this time, with exit status 124"
    add("--timeout", help=timeout, **times)
    linger = "how long the other processes may run on after one failed, to print "
    linger += "their errors and statuses (default: 0; at least 2 after a lost peer)"
    add("--linger", default=0.0, help=linger, **times)
    grace = "from the signal that ends a process to SIGKILL (default: 5)"
    add("--grace", default=5.0, help=grace, **times)
    command_line.add_module(parser)
    program = "or the name of a module, after -m; and its arguments"
    # Unlike nargs="+", PARSER also takes the options and "--" that follow the script.
    add("program", nargs=argparse.PARSER, metavar="script.py", help=program)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs the user's program in all processes of a job; returns the exit status."""
    program = command_line.split_program(given.program)
    if given.processes % given.hosts:
        raise ConfigurationError(
            f"launch: --hosts {given.hosts} does not divide -n {given.processes}. Give "
            "a divisor."
        )
    if not given.module:  # of a module, the processes report that it does not exist
        command_line.check_program("launch", program[0], is_module=False)
    # After "--", Python accepts even a script whose name begins with "-".
    kind = "-m" if given.module else "--"
    job = Job(
        given.processes,
        given.devices_per_process,
        given.hosts,
        given.timeout,
        given.linger,
        given.grace,
    )
    return job.run([kind, *program])
