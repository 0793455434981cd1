"""Detects processes that entered `initialize_ub` and have died since.

The coordination service of `jax.distributed` detects a death by missing heartbeats,
after 100 s. Processes that share a PID namespace can detect it at once: each process
writes its PID to the key-value store before it does anything else.
"""

import json
import os
import pathlib

from jax._src import distributed  # noqa: TID251, as in jax_service

from jax_ub._src.runtime import hosts
from jax_ub._src.runtime.bootstrap.jax_service import JaxService

_SCOPE = "processes"


def enter(process: int) -> None:
    """Writes the PID of this process to jax's key-value store.

    Does nothing if `jax.distributed` is not initialized.

    Raises:
        CommunicatorError: if the job's coordinator does not answer.
    """
    if distributed.global_state.client is not None:
        own = [_namespace(), os.getpid(), _start_of(os.getpid())]
        JaxService(_SCOPE).write(str(process), json.dumps(own))


class Presence:
    """Reports which other processes have died. Caches the PIDs of running processes."""

    def __init__(self) -> None:
        """Opens jax's key-value store.

        Raises:
            CommunicatorError: if `jax.distributed` is not initialized.
        """
        self._store = JaxService(_SCOPE)
        self._namespace = _namespace()
        self._seen: dict[int, str] = {}

    def lost(self, process: int) -> str | None:
        """Returns how a process has died, such as "(pid 123) died".

        Returns None if the process is running, has not entered `initialize_ub`, or is
        in another PID namespace.

        Raises:
            CommunicatorError: if the job's coordinator does not answer.
        """
        if process in self._seen and self._end_of(self._seen[process]) is None:
            return None
        # A process that was restarted has written a new PID.
        text = self._store.read(str(process))
        if text is None:
            return None
        self._seen[process] = text
        return self._end_of(text)

    def _end_of(self, text):
        namespace, pid, start = json.loads(text)
        if namespace != self._namespace or start is None or _start_of(pid) == start:
            return None
        return f"(pid {pid}) died"


def _namespace():
    try:
        return f"{hosts.identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid):
    """Returns the start time of a process in kernel ticks; None if it is not running.

    PID and start time together identify a process, since the kernel reuses PIDs.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The fields follow the last ")": the command name may contain spaces and
    # parentheses. The states Z (zombie) and X (dead) mean that the process has ended.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
