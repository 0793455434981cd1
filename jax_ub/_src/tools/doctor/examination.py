"""Runs all checks of the doctor in order."""

from collections.abc import Iterator

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.lowering_log import fallbacks
from jax_ub._src.runtime import backend
from jax_ub._src.tools.doctor import installation, trials
from jax_ub._src.tools.doctor.connections import between_processes, named_overlaps
from jax_ub._src.tools.doctor.devices import devices
from jax_ub._src.tools.doctor.finding import Finding, State


def examine(*, together: bool = False) -> Iterator[Finding]:
    """Runs all checks of the doctor in order and yields their findings.

    A check that depends on others follows them. If JAX cannot start, the rest is
    omitted.

    Args:
        together: whether all processes of the job call this at the same time; the
            checks then compute across processes. No process may have called
            `initialize_ub`.
    """
    trials.start_devices()
    yield from installation.packages()
    yield from installation.environment()
    yield from installation.ffi_api()
    try:
        backend.start()
    except UnsupportedOverlapError as error:  # the remaining checks need devices
        yield Finding("devices", State.FAULT, str(error))
        return
    yield from installation.engine_here()
    yield from devices()
    if not together:
        yield from trials.methods_on(trials.mesh_of(together))
    yield from between_processes()
    yield from named_overlaps(together)
    yield from _fallbacks()


def _fallbacks():
    """Yields a finding for each reason why calls here were not overlapped."""
    by_reason: dict[str, list[str]] = {}
    for fallback in fallbacks():
        by_reason.setdefault(fallback.reason, []).append(fallback.label)
    for reason, labels in by_reason.items():
        text = f"{len(labels)} calls, the last {labels[-1]}: {reason}"
        yield Finding("not overlapped", State.WARNING, text)
