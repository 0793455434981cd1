"""Which processes of a job have entered `initialize_ub`, and which of them have ended.

The coordination service of `jax.distributed` learns of a death by missing heartbeats,
100 s later. Processes that share a PID namespace see it at once: each leaves its PID in
the key-value store before it does anything else.
"""

import json
import os
import pathlib

from jax._src import distributed  # noqa: TID251, as in jax_service

from jax_ub.runtime import hosts
from jax_ub.runtime.bootstrap.jax_service import JaxService

_SCOPE = "processes"


def enter(process: int) -> None:
    """Leaves the PID of this process; nothing outside a job.

    Raises:
        CommunicatorError: if the coordinator of the job does not answer.
    """
    if distributed.global_state.client is not None:
        own = [_namespace(), os.getpid(), _start_of(os.getpid())]
        JaxService(_SCOPE).write(str(process), json.dumps(own))


class Presence:
    """What this process knows of the others; each is read until it has entered."""

    def __init__(self) -> None:
        """Begins to look.

        Raises:
            CommunicatorError: if this process belongs to no job.
        """
        self._store = JaxService(_SCOPE)
        self._namespace = _namespace()
        self._seen: dict[int, str] = {}

    def lost(self, process: int) -> str | None:
        """Returns how a process that entered has ended, or None.

        Raises:
            CommunicatorError: if the coordinator of the job does not answer.
        """
        if process in self._seen and self._end_of(self._seen[process]) is None:
            return None
        # A process that was started anew has left another PID.
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
    """When a process began, in the kernel's ticks; None if there is none."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may contain anything. "Z" has ended already.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
