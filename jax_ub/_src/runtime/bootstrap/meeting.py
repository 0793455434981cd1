"""Rendezvous of the processes of a mesh.

All processes of a job can reach jax's key-value store, so they exchange their status
there first. They switch to the store of `bootstrap_backend` only after every process
has opened it, so no process waits on a store that another one cannot open.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from jax_ub._src.errors import CommunicatorError
from jax_ub._src.runtime.bootstrap.presence import Presence
from jax_ub._src.runtime.bootstrap.process_all_gather import ProcessAllGather, Values
from jax_ub._src.runtime.bootstrap.store import JAX, backend_name, open_board


def open_rendezvous(
    backend: str | None,
    process: int,
    processes: Sequence[int],
    timeout_s: float,
    own_error: Exception | None,
) -> ProcessAllGather:
    """Returns an all-gather over all processes of a mesh, on the chosen backend.

    Args:
        backend: the `bootstrap_backend` of this process.
        process: the index of this process.
        processes: the indices of all processes of the mesh.
        timeout_s: the timeout of each round, in seconds.
        own_error: why this process cannot take part, or None. With the backend "jax" it
            is not sent here; the caller sends it in the first round.

    Raises:
        CommunicatorError: if another process failed, has a different backend, or cannot
            open its store. If `own_error` is given and was sent, that is raised.
        TimeoutError: if processes did not arrive before the deadline.
    """
    # The scope depends on the processes only, so that a process with a different
    # axis_name joins the same rendezvous and the difference is reported.
    numbers = ",".join(map(str, sorted(processes))).encode()
    scope = f"initialize_ub-{hashlib.sha256(numbers).hexdigest()[:16]}"
    store: Any = open_board(JAX, scope)
    lost = Presence().lost
    on_jax = ProcessAllGather(store, process, processes, timeout_s, lost)
    name = backend_name(backend)
    if name == JAX:
        return on_jax
    with on_jax:
        if own_error is None:
            try:
                store = open_board(backend, scope)
            except CommunicatorError as error:
                own_error = error
        peer_info = gather_or_raise(
            on_jax, {**status(own_error), "backend": name}, own_error
        )
        failure = own_error or refusal_of_another(peer_info)
    if failure is not None:
        raise failure
    return ProcessAllGather(store, process, processes, timeout_s, lost)


def status(own_error: Exception | None) -> dict[str, Any]:
    """Returns the status that a process sends: its error as text, or None."""
    return {"refused": None if own_error is None else str(own_error)}


def gather_or_raise(
    agreement: ProcessAllGather,
    value: Any,
    own_error: Exception | None,
    timeout_s: float | None = None,
) -> Values:
    """All-gathers one value per process.

    If the round fails and `own_error` is given, that is raised instead.

    Raises:
        CommunicatorError: if another process failed, or `own_error`.
        TimeoutError: if processes did not arrive before the deadline.
    """
    try:
        return agreement.gather(value, timeout_s)
    except CommunicatorError as error:
        # The earlier error of this process explains more than the failed round.
        if own_error is None:
            raise
        raise own_error from error


def refusal_of_another(peer_info: Values) -> CommunicatorError | None:
    """Returns the error that the processes' statuses imply, or None.

    It is the first process's refusal, or a difference in `bootstrap_backend`.
    """
    for process, one in sorted(peer_info.items()):
        if one["refused"] is not None:
            return CommunicatorError(
                f"initialize_ub: process {process} refused: {one['refused']}"
            )
    # Only processes whose backend is not "jax" send its name.
    backends = {process: one.get("backend", JAX) for process, one in peer_info.items()}
    return difference("bootstrap_backend", backends)


def difference(name: str, values: Values) -> CommunicatorError | None:
    """Returns an error that names two processes with different values, or None.

    Args:
        name: what the values are, for the error.
        values: the value of each process.
    """
    first = min(values)
    for process, value in sorted(values.items()):
        if value != values[first]:
            return CommunicatorError(
                f"initialize_ub: the processes differ in {name}: process {first} "
                f"has {values[first]}, process {process} has {value}. Give all "
                "processes the same."
            )
    return None
