"""The fusions that `OperationFuser` tries, in order."""

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


def _register(name, fusion, prepend):
    if fusion not in _FUSIONS[name]:
        _FUSIONS[name].insert(0 if prepend else len(_FUSIONS[name]), fusion)
