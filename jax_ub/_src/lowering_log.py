"""Records what lowering decides: fallbacks of the process, calls of one program."""

import collections
import contextlib
import contextvars
import dataclasses
import re
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_ub._src.methods import Method, PallasTiles


@dataclasses.dataclass(frozen=True)
class Fallback:
    """A record that overlap was not used as asked, and why.

    A call ran as plain `jax.lax`, the kernel that a tuned file chose could not run it,
    or several ranks repeat the work of a layer.

    Attributes:
        label: the call's name.
        reason: why.
    """

    label: str
    reason: str


# The log is bounded, so that a process that lowers programs for weeks does not run out
# of memory.
_FALLBACKS: collections.deque[Fallback] = collections.deque(maxlen=1024)


def record_fallback(label: str, reason: str) -> None:
    """Adds a call, and why it fell back, to the list that `fallbacks` returns."""
    _FALLBACKS.append(Fallback(label, reason))


@contextlib.contextmanager
def falling_back(label: str, reason: str) -> Iterator[None]:
    """Records that plain JAX replaces an op that is traced or lowered in the block.

    The block is in a name scope that contains label and reason, so that a jaxpr or
    compiled text shows its fallbacks. `fallback_in` reads the scope.
    """
    record_fallback(label, reason)
    with jax.named_scope(_encode("fallback", label, reason)):
        yield


def plain_by_choice(label: str, reason: str) -> AbstractContextManager[Any]:
    """Marks operations traced in the block as plain JAX, which the user chose.

    `fallback_in` reads the mark. It is not a fallback, so `fallbacks` does not list it.
    """
    return jax.named_scope(_encode("fallback", label, reason))


def fallback_in(scope: str) -> Fallback | None:
    """Returns the `Fallback` in a name scope that `falling_back` added, else None."""
    return _decode("fallback", scope)


# The reason for which several ranks repeat the operations being traced, or "".
_REPLICATED: contextvars.ContextVar[str] = contextvars.ContextVar(
    "replicated", default=""
)


@contextlib.contextmanager
def replicating(label: str, reason: str) -> Iterator[None]:
    """Marks operations traced in the `with` block as repeated by several ranks.

    Calls of jax_ub read the mark by `replicated`. Plain JAX operations are marked by a
    name scope, which `replicated_in` reads.
    """
    token = _REPLICATED.set(reason)
    try:
        with jax.named_scope(_encode("replicated", label, reason)):
            yield
    finally:
        _REPLICATED.reset(token)


def replicated() -> str:
    """Returns why the operations being traced run on several ranks alike, else ""."""
    return _REPLICATED.get()


def replicated_in(scope: str) -> Fallback | None:
    """Returns label and reason in a name scope that `replicating` added, else None."""
    return _decode("replicated", scope)


def is_mark(scope: str) -> bool:
    """Returns whether a name scope was added by this module, not by the user."""
    return any(f"{kind}[" in scope for kind in ("fallback", "replicated"))


def _encode(kind, label, reason):
    # The texts are quoted, because name stacks join scopes by "/" and HLO prints them
    # in quotes.
    texts = (urllib.parse.quote(text, safe="()=,:; ") for text in (label, reason))
    return f"{kind}[{'|'.join(texts)}]"


def _decode(kind, scope):
    found = re.search(rf"{kind}\[([^\]|]*)\|([^\]|]*)\]", scope)
    return found and Fallback(*map(urllib.parse.unquote, found.groups()))


def fallbacks(*, clear: bool = False) -> tuple[Fallback, ...]:
    """Returns the latest 1024 calls that fell back or repeat work, oldest first.

    These are automatic calls that became plain `jax.lax`, calls that JAX's Pallas
    kernel could not run although a tuned file chose it, and layers whose work several
    ranks repeat, because no mesh axis known to the layer shards it. Calls are added
    when they are traced or lowered. `ub.explain` reports the same for one program.
    Transformer Engine: none.

    Args:
        clear: whether to empty the record.

    Returns:
        One entry for each time such a call was traced or lowered. `.label` is the
        call's name, and `.reason` says why it fell back or which work is repeated.
    """
    found = tuple(_FALLBACKS)
    if clear:
        _FALLBACKS.clear()
    return found


# The kinds of problems about which this process has warned.
_WARNED: set[str] = set()


def warn_once(kind: str, text: str) -> None:
    """Warns about the first problem of a kind in this process."""
    if kind not in _WARNED:
        _WARNED.add(kind)
        warnings.warn(text, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """A jax_ub call in a lowered program, with its operands and resolved method.

    Attributes:
        call: the `Call`.
        operands: shapes and dtypes of the operands.
        scope: the name stack where the call was traced.
        method: the method that the call runs by; "auto" is resolved.
        reason: why the call became plain `jax.lax`; None if it did not.
        tiles: the tiles with which JAX's Pallas kernel runs the call in place of
            `method`; None if it does not.
        why_not_pallas: why that kernel, which a tuned table chose, cannot run the call;
            "" if it was not chosen or runs.
    """

    call: Any
    operands: tuple[jax.ShapeDtypeStruct, ...]
    scope: str
    method: Method
    reason: str | None
    tiles: PallasTiles | None = None
    why_not_pallas: str = ""


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
        # The list is found by identity, because list.remove compares by equality and
        # could remove another list.
        _LISTENERS[:] = [one for one in _LISTENERS if one is not found]


def record(
    ctx: Any, call: Any, method: Method, reason: str | None = None, **pallas: Any
) -> None:
    """Reports a call that is being lowered to all active `recording` blocks.

    Called by the lowering rules. `pallas` has the last fields of `LoweredCall`.
    """
    if not _LISTENERS:
        return
    operands = tuple(shape_of(aval) for aval in ctx.avals_in)
    scope = str(ctx.name_stack)
    lowered = LoweredCall(call, operands, scope, method, reason, **pallas)
    for listener in _LISTENERS:
        listener.append(lowered)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an aval, without its sharding and weak type."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
