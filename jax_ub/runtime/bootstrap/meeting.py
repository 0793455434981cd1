"""How the processes of a mesh find each other, and learn who refuses.

All of a job have jax's store. They meet there, and go on where `bootstrap_backend` says
once all have said that they can: nobody waits on a store that another cannot open.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from jax_ub.errors import CommunicatorError
from jax_ub.runtime.bootstrap.presence import Presence
from jax_ub.runtime.bootstrap.process_all_gather import ProcessAllGather, Values
from jax_ub.runtime.bootstrap.store import JAX, backend_name, open_board


def open_rendezvous(
    backend: str | None,
    process: int,
    processes: Sequence[int],
    timeout_s: float,
    own_error: Exception | None,
) -> ProcessAllGather:
    """Begins an agreement of all processes of a mesh.

    Args:
        backend: the `bootstrap_backend` that this process was given.
        process: its number.
        processes: the numbers of all that take part.
        timeout_s: how long a round may last.
        own_error: why this process cannot go on, or None; on jax's store it is still to
            be told.

    Raises:
        CommunicatorError: if another process refused, has another backend, or cannot
            open its store; the own refusal, where it has been told.
        TimeoutError: if processes were missing when the deadline passed.
    """
    # Of the processes alone, so that one with another axis_name meets the others too.
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
    """What `refusal_of_another` wants to know of a process."""
    return {"refused": None if own_error is None else str(own_error)}


def gather_or_raise(
    agreement: ProcessAllGather,
    value: Any,
    own_error: Exception | None,
    timeout_s: float | None = None,
) -> Values:
    """Gathers a value of every process; the own error goes before that of a round.

    Raises:
        CommunicatorError: as `Agreement.gather`; the own error.
        TimeoutError: as `Agreement.gather`.
    """
    try:
        return agreement.gather(value, timeout_s)
    except CommunicatorError as error:
        # What went wrong here first says more than that others did not come.
        if own_error is None:
            raise
        raise own_error from error


def refusal_of_another(peer_info: Values) -> CommunicatorError | None:
    """Why the processes cannot go on together, by what each said of itself."""
    for process, one in sorted(peer_info.items()):
        if one["refused"] is not None:
            return CommunicatorError(
                f"initialize_ub: process {process} refused: {one['refused']}"
            )
    # Only those that go on elsewhere name a backend.
    backends = {process: one.get("backend", JAX) for process, one in peer_info.items()}
    return difference("bootstrap_backend", backends)


def difference(name: str, values: Values) -> CommunicatorError | None:
    """What the processes differ in, with the values of two of them."""
    first = min(values)
    for process, value in sorted(values.items()):
        if value != values[first]:
            return CommunicatorError(
                f"initialize_ub: the processes differ in {name}: process {first} "
                f"has {values[first]}, process {process} has {value}. Give all "
                "processes the same."
            )
    return None
