"""The fusions that `OperationFuser` tries, in order."""

import contextlib
from collections.abc import Iterator

from jax_ub.errors import FusionError, shown
from jax_ub.ops.operation import Fusion

PASSES = ("joint", "forward", "backward")
_FUSIONS: dict[str, list[Fusion]] = {name: [] for name in PASSES}


def register_joint_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a fusion of forward and backward together, which is tried first.

    Args:
        fusion: takes a list of operations in forward order, basic or fused, and returns
            one that stands for the same basic operations: see
            `ops.operation.fuse_windows`.
        prepend: whether it is tried before those of its pass that are registered.

    Raises:
        FusionError: if it cannot be called.
    """
    _register("joint", fusion, prepend)


def register_forward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a fusion of the forward; see `register_joint_fusion`."""
    _register("forward", fusion, prepend)


def register_backward_fusion(fusion: Fusion, *, prepend: bool = False) -> None:
    """Registers a fusion of the backward; see `register_joint_fusion`."""
    _register("backward", fusion, prepend)


def unregister_fusion(fusion: Fusion) -> None:
    """Takes a fusion out of every pass."""
    for fusions in _FUSIONS.values():
        while fusion in fusions:
            fusions.remove(fusion)


def fusions(name: str) -> tuple[Fusion, ...]:
    """The fusions of one pass: "joint", "forward" or "backward"."""
    return tuple(_FUSIONS[name])


@contextlib.contextmanager
def without_fusions() -> Iterator[None]:
    """Runs every basic operation that is traced in it by itself.

    To measure what fusing saves, or to see whether a fusion is at fault. Fused
    operations that the caller constructed stay. A function
    that was jitted and traced before keeps what it was traced with.
    """
    registered = {name: tuple(found) for name, found in _FUSIONS.items()}
    for found in _FUSIONS.values():
        found.clear()
    try:
        yield
    finally:
        for name, before in registered.items():
            # Those that were registered meanwhile stay, behind.
            _FUSIONS[name][:] = dict.fromkeys([*before, *_FUSIONS[name]])


def _register(name, fusion, prepend):
    if not callable(fusion):
        raise FusionError(
            f"register_{name}_fusion: fusion = {shown(fusion)} cannot be called. Pass "
            "a function that takes and returns a list of operations."
        )
    if fusion not in _FUSIONS[name]:
        _FUSIONS[name].insert(0 if prepend else len(_FUSIONS[name]), fusion)
