"""Starts the processes of a job on this machine, and waits for them."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from jax_ub._src.errors import ConfigurationError
from jax_ub._src.runtime import settings
from jax_ub._src.tools.launch import supervisor

# Loopback address of the job's coordinator. All processes run on this machine, so they
# can reach it.
_HOST = "127.0.0.1"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Maps the fields of `sys.flags` to the letters of Python's command-line options. The
# options that make Python interactive are left out.
_OPTIONS = {
    "isolated": "I",
    "ignore_environment": "E",
    "no_user_site": "s",
    "safe_path": "P",
    "no_site": "S",
    "dont_write_bytecode": "B",
    "optimize": "O",
    "bytes_warning": "b",
    "debug": "d",
    "verbose": "v",
    "quiet": "q",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of `jax.distributed`: processes of this machine that compute together.

    Attributes:
        num_processes: number of processes.
        devices_per_process: CPU devices of a process, or GPUs.
        num_hosts: number of simulated hosts, which share no memory.
        timeout_s: ends all processes after this time; None never does.
        linger_s: how long the other processes run on after one failed.
        grace_s: from the signal that ends a process to SIGKILL.
        folder: a folder that is removed if the process that runs the job is killed.
    """

    num_processes: int
    devices_per_process: int
    num_hosts: int = 1
    timeout_s: float | None = None
    linger_s: float = 0.0
    grace_s: float = 5.0
    folder: str | None = None

    def run(self, program: Sequence[str], stdout: int | None = None) -> int:
        """Runs a Python program in all processes, and waits for their exit.

        `program` are arguments of Python: a script or a module, and its arguments.
        `stdout` is an argument of `subprocess.Popen`.

        Returns:
            0 if all processes exited with 0; otherwise the status of the first process
            that exited with another one, or 128 + n if signal n ended it; 124 after the
            timeout.

        Raises:
            ConfigurationError: if the environment is invalid.
            SystemExit: with the same status, if a signal has ended the job.
        """
        if sys.platform != "linux":
            raise ConfigurationError(
                f"launch: it needs Linux, and this is {sys.platform}. Start the "
                "processes another way, with arguments of jax.distributed.initialize."
            )
        processes = range(self.num_processes)
        with _reserved_port() as port:
            environments = [self.environment(os.environ, i, port) for i in processes]
            command = [*python(), *program]
            more = {"command": command, "environments": environments}
            return _supervise(dataclasses.asdict(self) | more, stdout)

    def environment(
        self, given: Mapping[str, str], process: int, port: int
    ) -> dict[str, str]:
        """Returns the environment variables with which a process joins the job.

        `jax.distributed.initialize()` then needs no arguments. JAX has no variables for
        the process index and the number of processes, but it detects Slurm, so this
        function sets the variables of a Slurm step on one node. `given` is the
        launcher's environment, which defaults do not replace.
        """
        if _DEVICE_COUNT_FLAG in given.get("XLA_FLAGS", ""):
            raise ConfigurationError(
                f"launch: XLA_FLAGS has {_DEVICE_COUNT_FLAG}, which JAX rejects next "
                "to the number of devices that launch sets. Take it out of XLA_FLAGS "
                "and pass --devices-per-process."
            )
        first = process * self.devices_per_process
        devices = range(first, first + self.devices_per_process)
        address = f"{_HOST}:{port}"
        defaults = {
            "NPROC": str(settings.pool_threads_for(self.devices_per_process)),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
        }
        job_variables = {
            "JAX_COORDINATOR_ADDRESS": address,
            # The coordinator listens on the loopback address, which other machines
            # cannot reach.
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_process),
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices)),
            "SLURM_JOB_ID": given.get("SLURM_JOB_ID", "1"),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NTASKS": str(self.num_processes),
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process),
        }
        if self.num_hosts > 1:
            host = process * self.num_hosts // self.num_processes
            job_variables["JAX_UB_HOST_ID"] = f"host{host}"
        result = {**defaults, **given, **job_variables, **_no_proxy(given)}
        # JAX looks for Open MPI before it looks for Slurm. Under mpirun, this variable
        # would make JAX join the job of mpirun instead.
        result.pop("OMPI_MCA_orte_hnp_uri", None)
        return result


def python() -> list[str]:
    """Returns the command line of this interpreter, with options such as `-W error`."""
    letters = (each * getattr(sys.flags, name) for name, each in _OPTIONS.items())
    # `sys._xoptions` is documented, although its name begins with an underscore. The
    # `-X` options have no other name.
    implementation = [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ]
    warnings = (f"-W{each}" for each in sys.warnoptions)
    options = (f"-{each}" for each in letters if each)
    return [sys.executable, *options, *implementation, *warnings]


def _no_proxy(given):
    """Returns the variable that exempts the coordinator from proxies, if any is set."""
    if not any(name.lower().endswith("_proxy") for name in given):
        return {}
    hosts = given.get("no_proxy", given.get("NO_PROXY", "")).split(",")
    return {"no_proxy": ",".join([*filter(None, hosts), _HOST])}


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserves a TCP port for the coordinator, so that no other program gets the port.

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
                raise ConfigurationError(
                    f"launch: the coordinator's address {_HOST} cannot be reached: "
                    f"{error.strerror}. Bring the loopback interface up: ip link set "
                    "lo up."
                ) from error
        yield port


def _supervise(job, stdout) -> int:
    """Starts the supervisor, which runs the job's processes, and waits for it.

    If the supervisor or this process is killed, the other one ends all ranks. The
    signal handler does not raise, because an exception during `Popen` would leave the
    supervisor running.
    """
    supervisor.adopt_orphans()
    others = supervisor.descendants()
    started: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number, _):
        received.append(number)
        for process in started:
            process.send_signal(number)

    with supervisor.handling(forward):
        process = subprocess.Popen(
            # The supervisor needs neither jax nor PYTHONPATH, so it runs in Python's
            # isolated mode, which starts fast.
            [sys.executable, "-I", "-S", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=stdout,
            # In a new session, the supervisor does not get Ctrl-C from the terminal.
            # This process forwards the signal.
            start_new_session=True,
        )
        started.append(process)
        for number in received:
            process.send_signal(number)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        # The pipe to the supervisor stays open. When this process exits, even by
        # SIGKILL, the kernel closes the pipe, and the supervisor ends all ranks.
        status = process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a write that failed above
            process.stdin.close()
        supervisor.kill_descendants(others)
    if status < 0:
        name = supervisor.signal_name(-status)
        print(f"launch: {name} ended the supervisor.", file=sys.stderr)
        status = 128 - status
    if received:
        raise SystemExit(status)
    return status
