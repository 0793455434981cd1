"""Tells whoever asks of every call that is lowered, and why one became plain JAX."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jax_ub.methods import Method


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """One call call_config of one program.

    Attributes:
        call: the `Call`.
        operands: their shapes and dtypes.
        scope: the name stack where it was traced.
        method: by which it runs, where nobody said, too.
        reason: why it became plain `jax.lax`; None where it did not.
    """

    call: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    scope: str
    method: Method
    reason: str | None


_LISTENERS: list[list[LoweredCall]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[LoweredCall]]:
    """Yields a list to which every call is added that is lowered in the block."""
    found: list[LoweredCall] = []
    _LISTENERS.append(found)
    try:
        yield found
    finally:
        # Not list.remove, which takes the first that is equal: another empty one.
        _LISTENERS[:] = [one for one in _LISTENERS if one is not found]


def record(ctx: Any, call: Any, method: Method, reason: str | None = None) -> None:
    """Tells whoever listens, from a lowering rule."""
    if not _LISTENERS:
        return
    operands = tuple(shape_of(aval) for aval in ctx.avals_in)
    lowered = LoweredCall(call, operands, str(ctx.name_stack), method, reason)
    for listener in _LISTENERS:
        listener.append(lowered)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone, to compare calls by."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
