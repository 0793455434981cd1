"""Registry of functions that fuse operations; `OperationFuser` applies them."""

import contextlib
from collections.abc import Iterator

from jax_ub._src.errors import FusionError, shown
from jax_ub._src.ops.operation import Fusion

PASSES = ("joint", "forward", "backward")
_FUSIONS: dict[str, list[Fusion]] = {name: [] for name in PASSES}


def register_joint_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations for forward and backward together.

    Joint fusions run before the fusions of one direction.

    Args:
        fusion: takes a list of basic and fused operations in forward order; returns a
            list of the same basic operations, some of them fused. See
            `ops.operation.fuse_windows`.
        prepend: whether the fusion runs before the other registered joint fusions.

    Raises:
        FusionError: if `fusion` is not callable.
    """
    _register("joint", fusion, prepend)


def register_forward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations in the forward only.

    `fusion` and `prepend` are as in `register_joint_fusion`.
    """
    _register("forward", fusion, prepend)


def register_backward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a function that fuses operations in the backward only.

    `fusion` and `prepend` are as in `register_joint_fusion`.
    """
    _register("backward", fusion, prepend)


def unregister_fusion(fusion: Fusion) -> None:
    """Removes a registered fusion, for the forward, the backward or both."""
    for fusions in _FUSIONS.values():
        while fusion in fusions:
            fusions.remove(fusion)


def fusions(name: str) -> tuple[Fusion, ...]:
    """Returns the registered fusions of a pass, in the order in which they run.

    `name` is "joint", "forward" or "backward".
    """
    return tuple(_FUSIONS[name])


@contextlib.contextmanager
def without_fusions() -> Iterator[None]:
    """Disables all registered fusions for calls that are traced inside the context.

    Use it to measure what fusion saves, or to find out whether a fusion causes an
    error. Fused operations that the caller constructed still run. A jitted function
    that was traced before is not traced again, so it keeps its fusions.
    """
    registered = {name: tuple(found) for name, found in _FUSIONS.items()}
    for found in _FUSIONS.values():
        found.clear()
    try:
        yield
    finally:
        for name, before in registered.items():
            # Keep fusions that were registered inside the context, after the others.
            _FUSIONS[name][:] = dict.fromkeys([*before, *_FUSIONS[name]])


def _register(name, fusion, prepend):
    if not callable(fusion):
        raise FusionError(
            f"register_{name}_fusion: fusion = {shown(fusion)} cannot be called. Pass "
            "a function that takes and returns a list of operations."
        )
    if fusion not in _FUSIONS[name]:
        _FUSIONS[name].insert(0 if prepend else len(_FUSIONS[name]), fusion)
