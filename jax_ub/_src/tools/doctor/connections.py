"""Checks shared memory between processes, and lists overlaps that users have named."""

from collections.abc import Iterator

from jax_ub._src.runtime import communicators, cpu_engine, hosts, registry
from jax_ub._src.runtime.initialize import destroy_ub, initialize_ub
from jax_ub._src.tools.doctor import trials
from jax_ub._src.tools.doctor.finding import Finding, State


def between_processes() -> Iterator[Finding]:
    """Yields a finding: whether this process can share memory with others here.

    Processes of the same host exchange data through shared memory.
    """
    host = hosts.short_name(hosts.identity())
    try:
        cpu_engine.load().endpoint()
    except ImportError:
        return
    except RuntimeError as error:
        yield Finding("between processes", State.FAULT, str(error))
    else:
        text = f"can share memory with others on host {host!r}"
        yield Finding("between processes", State.FINE, text)


def _connections():
    """Yields a finding for each group of ranks: how it is connected, or why not."""
    failed = dict(communicators.failures())
    for connection in communicators.connections():
        name = f"devices {list(connection.group)}"
        where = f"processes {sorted(set(connection.processes))}"
        if connection.group in failed:
            yield Finding(name, State.FAULT, f"{where}: {failed[connection.group]}")
        elif connection.reason is not None:
            text = f'{where}: "auto" is plain jax.lax, since {connection.reason}'
            yield Finding(name, State.WARNING, text)
        else:
            yield Finding(name, State.FINE, f"{where}: {_connected(connection)}")


def _connected(connection):
    """Returns a text that names the sharing mode of the group's memory.

    It also has each mode that is preferred to it, and the reason why it cannot be used.
    """
    how = getattr(connection.communicator, "how", None)
    if how is None:
        return "connected"
    preferred = [
        f"; not by {way}: {reason}"
        for way, reason in connection.communicator.step_downs
    ]
    nvls = " with nvls" if connection.communicator.has_multicast else ""
    return f"connected by {how}{nvls}{''.join(preferred)}"


def named_overlaps(together: bool) -> Iterator[Finding]:
    """Yields findings about the overlaps by name that `initialize_ub` has configured.

    If it was not called, it is called on a small mesh, to report its defaults.
    """
    if registry.axes():
        yield from _connections()
        yield from map(_finding_of, registry.axes())
        return
    mesh = trials.mesh_of(together)
    try:
        initialize_ub((8 * mesh.size, 16), mesh.size, mesh=mesh, axis_name=trials.AXIS)
    except Exception as error:  # any error is a finding
        yield Finding("initialize_ub", State.FAULT, f"{type(error).__name__}: {error}")
        return
    yield from _connections()
    if together:
        yield from trials.methods_on(mesh)
    (initialized_axis,) = registry.axes()
    text = f"not called here; the defaults are {_methods_of(initialized_axis)}"
    destroy_ub()
    yield Finding("initialize_ub", State.NOTE, text)


def _finding_of(initialized_axis):
    axes = ", ".join(initialized_axis.axis_name)
    text = (
        f"{initialized_axis.tp_size} ranks, [T, H] = {list(initialized_axis.shape)}: "
        f"{_methods_of(initialized_axis)}"
    )
    return Finding(f"axis {axes}", State.FINE, text)


def _methods_of(initialized_axis):
    by_method: dict[str, list[str]] = {}
    for name, mode in initialized_axis.overlaps:
        method = initialized_axis.overlaps[name, mode].method
        by_method.setdefault(f"{method} ({mode.name})", []).append(name)
    return "; ".join(f"{one}: {', '.join(names)}" for one, names in by_method.items())
