"""Rendezvous of the processes of `initialize_ub`, through the service of JAX.

The coordinator of `jax.distributed` has a key-value store that all processes of a job
reach. They exchange messages there, and each process writes its PID there, so that the
others can detect its death. The coordinator itself detects a death by missing
heartbeats, after 100 s.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

# The service of `jax.distributed` accepts only one client per process. JAX creates this
# client, and only a private module of JAX gives access to it.
from jax._src import distributed  # noqa: TID251

from jax_ub._src.errors import (
    CommunicatorError,
    ConfigurationError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.runtime import hosts
from jax_ub._src.runtime.process_all_gather import ProcessAllGather

_BACKENDS = ("jax", "mpi")
_PID_SCOPE = "processes"


def check_backend(backend: object) -> None:
    """Raises an error unless a `bootstrap_backend` is None, "jax" or "mpi"."""
    name = backend if isinstance(backend, str) else ""
    if backend is None or name in _BACKENDS:
        return
    if name.split(":")[0] == "file":
        raise ConfigurationError(
            f"initialize_ub: bootstrap_backend = {shown(backend)} was removed: the "
            "processes exchange messages through the service of jax.distributed. Leave "
            "it out, and call jax.distributed.initialize() in every process first. "
            "python -m jax_ub launch starts the processes of one host."
        )
    raise UnknownNameError(
        f"initialize_ub: bootstrap_backend = {shown(backend)} is unknown. "
        f"{nearest(backend, _BACKENDS)} None is jax: the service of "
        "jax.distributed.initialize(). Leave it out where Transformer Engine had "
        '"nccl" or "gloo".'
    )


def join_job(backend: object) -> None:
    """Initializes `jax.distributed` through MPI if the backend is "mpi".

    Does nothing if `jax.distributed` is initialized. With another backend, a process
    without `jax.distributed` has no job.
    """
    is_mpi = isinstance(backend, str) and backend == "mpi"
    if is_mpi and not jax.distributed.is_initialized():
        _initialize_by_mpi()


def publish_pid() -> None:
    """Publishes this process's PID, so that other processes can detect its death."""
    if jax.distributed.is_initialized():
        own = [_pid_namespace(), os.getpid(), _start_time(os.getpid())]
        JaxStore(_PID_SCOPE).write(str(jax.process_index()), json.dumps(own))


def _initialize_by_mpi():
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigurationError(
            'initialize_ub: bootstrap_backend = "mpi", but mpi4py is not installed. '
            "Install it (pip install mpi4py), or leave bootstrap_backend out and call "
            "jax.distributed.initialize()."
        )
    try:
        jax.distributed.initialize(cluster_detection_method="mpi4py")
    except (RuntimeError, ImportError) as error:
        raise ConfigurationError(
            'initialize_ub: bootstrap_backend = "mpi", but JAX cannot find the '
            f"processes by MPI: {error} Call "
            'jax.distributed.initialize(cluster_detection_method="mpi4py") before '
            "anything else of JAX."
        ) from error


def open_rendezvous(processes: Sequence[int], timeout_s: float) -> ProcessAllGather:
    """Returns an object that all-gathers values over the given processes."""
    own = jax.process_index()
    if len(processes) == 1:
        return ProcessAllGather(_OwnStore(), own, processes, timeout_s)
    # The scope (a prefix of the keys) depends only on the processes. A process that
    # passed a different axis_name therefore uses the same keys, and the difference is
    # detected and reported.
    numbers = ",".join(map(str, processes)).encode()
    scope = f"initialize_ub-{hashlib.sha256(numbers).hexdigest()[:16]}"
    lost = Presence().lost
    return ProcessAllGather(JaxStore(scope), own, processes, timeout_s, lost)


class _OwnStore(dict[str, str]):
    """A key-value store in local memory, for a mesh within a single process."""

    write = dict.__setitem__
    read = dict.get

    def erase(self, key: str) -> None:
        self.pop(key, None)


class JaxStore:
    """A key-value store: the keys with one prefix in the store of `jax.distributed`."""

    def __init__(self, scope: str):
        """Opens the store for the keys with prefix `jax_ub/<scope>/`."""
        self._client: Any = distributed.global_state.client
        self._prefix = f"jax_ub/{scope}/"
        if self._client is None:
            raise CommunicatorError(
                "initialize_ub: the mesh has devices of several processes, but this "
                "process belongs to no job. Call jax.distributed.initialize() first."
            )

    def write(self, key: str, text: str) -> None:
        try:
            self._client.key_value_set(self._prefix + key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _unreachable(error) from error

    def read(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(self._prefix + key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _unreachable(error) from error

    def erase(self, key: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(self._prefix + key)


def _unreachable(error):
    return CommunicatorError(
        "initialize_ub: the coordinator of jax.distributed, which stores the messages "
        f"of all processes, does not respond: {error}. Process 0 runs it: see why it "
        "exited."
    )


class Presence:
    """Detects by their PIDs which other processes of the job have exited."""

    def __init__(self) -> None:
        self._store = JaxStore(_PID_SCOPE)
        self._namespace = _pid_namespace()
        self._running: dict[int, str] = {}

    def lost(self, process: int) -> str | None:
        """Returns how a process was lost, as "(pid 123) died", or None if it was not.

        Returns None if the process is running, has not called `publish_pid`, or is in
        another PID namespace.
        """
        if process in self._running and self._death(self._running[process]) is None:
            return None
        # The PID is read again, because a restarted process has written a new one.
        text = self._store.read(str(process))
        if text is None:
            return None
        self._running[process] = text
        return self._death(text)

    def _death(self, text):
        namespace, pid, start = json.loads(text)
        if namespace != self._namespace or start in (None, _start_time(pid)):
            return None
        return f"(pid {pid}) died"


def _pid_namespace():
    try:
        return f"{hosts.identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid):
    """Returns when a process started, in kernel ticks, or None if it does not run.

    PID and start time together identify a process, since the kernel reuses PIDs.
    """
    try:
        line = pathlib.Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The fields of /proc/PID/stat are counted from the last ")", because the command
    # name before it may contain spaces and parentheses. The name may also end within a
    # UTF-8 character, since the kernel cuts it to 15 bytes. The states Z (zombie) and X
    # (dead) mean that the process has exited.
    state, *fields = line.rpartition(b")")[2].split()
    return None if state in b"ZX" else int(fields[18])
