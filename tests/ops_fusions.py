"""Fusions that tests register and unregister."""

import contextlib
import dataclasses

from jax_ub import ops
from jax_ub._src.ops import fuser
from jax_ub._src.ops.fused_operation import FusedOperation, fuse_windows


@dataclasses.dataclass(frozen=True)
class Chain(FusedOperation):
    """A fused operation that runs its operations one after another."""


@dataclasses.dataclass(frozen=True)
class DoubleAdd(FusedOperation):
    """Fuses Bias and AddExtraInput into one addition."""

    def forward(self, params, x, extra_inputs, saves):
        """Computes x + bias + extra."""
        y = x + params[0]["bias"].astype(x.dtype) + extra_inputs[1][0]
        return y, ((), ()), ({}, {})


def windows_of(kind, *types):
    """Returns a fusion of operations of `types`, in this order."""

    def match(rest):
        window = rest[: len(types)]
        if [type(op) for op in window] != list(types):
            return None
        return kind(tuple(window))

    return lambda ops: fuse_windows(ops, match)


def last_of(length):
    """Returns a fusion of the last `length` operations."""
    return lambda ops: [*ops[:-length], Chain(tuple(ops[-length:]))]


def first_of(length):
    """Returns a fusion of the first `length` operations."""
    return lambda ops: [Chain(tuple(ops[:length])), *ops[length:]]


PASSES = ("joint", "forward", "backward")


@contextlib.contextmanager
def only(*, joint=(), forward=(), backward=()):
    """Registers only these fusions in the context."""
    before = {name: fuser.fusions(name) for name in PASSES}
    _replace({"joint": joint, "forward": forward, "backward": backward})
    try:
        yield
    finally:
        _replace(before)


def _replace(fusions):
    register = {
        "joint": ops.register_joint_fusion,
        "forward": ops.register_forward_fusion,
        "backward": ops.register_backward_fusion,
    }
    for name in PASSES:
        for fusion in fuser.fusions(name):
            ops.unregister_fusion(fusion)
    for name, chosen in fusions.items():
        for fusion in chosen:
            register[name](fusion)
