"""Runs one program in several processes on this machine.

`jax.distributed.initialize()` needs no arguments in these processes. Every output line
begins with the index of its process. When a process fails, the launcher reports it,
ends all others and returns its exit status. Ctrl-C and the exit of the launcher also
end all processes.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jax_ub._src.runtime import settings
from jax_ub._src.tools.command_line import check_script, seconds, split_program
from jax_ub._src.tools.launch import supervisor
from jax_ub._src.tools.launch.parts import LaunchError, count, python

EXAMPLE = "launch -n 2 --devices-per-process 4 train.py --steps 3"
# Address of the coordinator, which all processes of this machine can reach.
_HOST = "127.0.0.1"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    number = "number of processes (default: 2)"
    add("-n", "--processes", type=count, default=2, metavar="N", help=number)
    devices = "CPU devices of a process, or GPUs (default: 1)"
    add("--devices-per-process", type=count, default=1, metavar="K", help=devices)
    hosts = "simulate this many hosts, which share no memory (default: 1)"
    add("--hosts", type=count, default=1, metavar="H", help=hosts)
    times: dict[str, Any] = {"type": seconds, "metavar": "SECONDS"}
    timeout = "end all processes after this time, with exit status 124"
    add("--timeout", help=timeout, **times)
    linger = "how long the other processes may run on after one failed, to print "
    linger += "their errors and statuses (default: 0; at least 2 after a lost peer)"
    add("--linger", default=0.0, help=linger, **times)
    grace = "from the signal that ends a process to SIGKILL (default: 5)"
    add("--grace", default=5.0, help=grace, **times)
    # Internal, set by `parts.parts_of`: the id of the process that starts the launcher,
    # and a folder that the launcher removes if that process exits.
    add("--parent", type=int, help=argparse.SUPPRESS)
    add("--parent-folder", help=argparse.SUPPRESS)
    add("-m", dest="module", action="store_true", help="run a module, not a script")
    program = "or the name of a module, after -m; and its arguments"
    # Unlike nargs="+", PARSER also takes the options and "--" that follow the script.
    add("program", nargs=argparse.PARSER, metavar="script.py", help=program)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs the user's program in all processes of a job, and waits for their exit.

    Returns:
        0 if all processes exited with 0; otherwise the status of the first process that
        exited with another one, or 128 + n if signal n ended it; 124 after `--timeout`.
    """
    if sys.platform != "linux":
        raise LaunchError(
            f"launch: it needs Linux, and this is {sys.platform}. Start the processes "
            "another way, with arguments of jax.distributed.initialize."
        )
    program = split_program(given.program)
    _check(given, program[0])
    # After "--", the name of a script may begin with "-".
    kind = "-m" if given.module else "--"
    with _reserved_port() as port:
        job = {
            "command": [*python(), kind, *program],
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


def _check(given, program):
    if given.processes % given.hosts:
        raise LaunchError(
            f"launch: --hosts {given.hosts} does not divide -n {given.processes}. Give "
            "a divisor."
        )
    if not given.module:
        check_script("launch", program, "To run a module, put -m before it.")


def environment(
    given: Mapping[str, str],
    *,
    process: int,
    num_processes: int,
    devices_per_process: int,
    port: int,
    num_hosts: int = 1,
) -> dict[str, str]:
    """Returns the environment variables of a job's process, by which JAX finds the job.

    `jax.distributed.initialize()` then needs no arguments. JAX has no variables for the
    process index and the number of processes, but it detects Slurm, so this function
    sets the variables of a Slurm step on one node. `given` is the launcher's
    environment, which defaults do not replace.
    """
    if _DEVICE_COUNT_FLAG in given.get("XLA_FLAGS", ""):
        raise LaunchError(
            f"launch: XLA_FLAGS has {_DEVICE_COUNT_FLAG}, which JAX rejects next to "
            "the number of devices that launch sets. Take it out of XLA_FLAGS and pass "
            "--devices-per-process."
        )
    first = process * devices_per_process
    devices = range(first, first + devices_per_process)
    address = f"{_HOST}:{port}"
    defaults = {
        "NPROC": str(settings.pool_threads_for(devices_per_process)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    job_variables = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not reachable from other machines
        "JAX_NUM_CPU_DEVICES": str(devices_per_process),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices)),
        "SLURM_JOB_ID": given.get("SLURM_JOB_ID", "1"),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(num_processes),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }
    if num_hosts > 1:
        job_variables["JAX_UB_HOST_ID"] = f"host{process * num_hosts // num_processes}"
    result = {**defaults, **given, **job_variables, **_no_proxy(given)}
    # JAX looks for Open MPI before Slurm. Under mpirun, it would find the job of mpirun
    # by this variable.
    result.pop("OMPI_MCA_orte_hnp_uri", None)
    return result


def _no_proxy(given):
    """Returns {"no_proxy": ...} with the coordinator's host; {} if no proxy is set."""
    if not any(name.lower().endswith("_proxy") for name in given):
        return {}
    hosts = given.get("no_proxy", given.get("NO_PROXY", "")).split(",")
    return {"no_proxy": ",".join([*filter(None, hosts), _HOST])}


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Yields a TCP port for the coordinator, which no other program can get.

    The coordinator also sets SO_REUSEPORT, so it can bind to the port of this socket,
    which does not listen.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((_HOST, 0))
        port = reserved.getsockname()[1]
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            try:  # sends no data; JAX itself would wait for minutes
                probe.connect((_HOST, port))
            except OSError as error:
                raise LaunchError(
                    f"launch: the coordinator's address {_HOST} cannot be reached: "
                    f"{error.strerror}. Bring the loopback interface up: ip link set "
                    "lo up."
                ) from error
        yield port


def _supervise(job, parent, parent_folder):
    """Starts the supervisor, which runs the job's processes, and waits for it.

    If the supervisor or this process is killed, the other one ends all ranks. If the
    process `parent` exits, this process ends all ranks and removes `parent_folder`.
    """
    supervisor.adopt_orphans()
    others = supervisor.descendants()
    process = subprocess.Popen(
        # Isolated mode, because it starts fast. The supervisor needs neither jax nor
        # PYTHONPATH.
        [sys.executable, "-I", "-S", supervisor.__file__],
        stdin=subprocess.PIPE,
        # The supervisor runs in a new session, so that only this process gets Ctrl-C
        # and forwards it.
        start_new_session=True,
    )
    assert process.stdin is not None
    with supervisor.handling(lambda number, _: process.send_signal(number)):
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
        with contextlib.suppress(BrokenPipeError):  # of a write that failed above
            process.stdin.close()
        supervisor.kill_descendants(others)
        if parent_folder is not None and os.getppid() != parent:
            shutil.rmtree(parent_folder, ignore_errors=True)
    if status < 0:
        name = supervisor.signal_name(-status)
        print(f"launch: {name} ended the supervisor.", file=sys.stderr)
    return 128 - status if status < 0 else status
