"""Records which calls a program lowers, with their methods and fallback reasons."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jax_ub._src.methods import Method


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """One call in a lowered program: its operands, its method and why it fell back.

    Attributes:
        call: the `Call`.
        operands: shapes and dtypes of the operands.
        scope: the name stack where the call was traced.
        method: the method that the call runs by; "auto" is resolved.
        reason: why the call became plain `jax.lax`; None if it did not.
    """

    call: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    scope: str
    method: Method
    reason: str | None


# The lists of all active `recording` blocks.
_LISTENERS: list[list[LoweredCall]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[LoweredCall]]:
    """Collects the calls that are lowered inside the `with` block in a list."""
    found: list[LoweredCall] = []
    _LISTENERS.append(found)
    try:
        yield found
    finally:
        # Not list.remove, which compares by equality: it could remove another list.
        _LISTENERS[:] = [one for one in _LISTENERS if one is not found]


def record(ctx: Any, call: Any, method: Method, reason: str | None = None) -> None:
    """Reports a call that is being lowered to all active `recording` blocks.

    Called by the lowering rules.
    """
    if not _LISTENERS:
        return
    operands = tuple(shape_of(aval) for aval in ctx.avals_in)
    lowered = LoweredCall(call, operands, str(ctx.name_stack), method, reason)
    for listener in _LISTENERS:
        listener.append(lowered)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an aval, without its sharding and weak type."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
