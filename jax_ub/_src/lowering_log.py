"""Records what lowering decides: fallbacks of the process, calls of one program."""

import collections
import contextlib
import contextvars
import dataclasses
import re
import sys
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from jax_ub._src import checks
from jax_ub._src.errors import see
from jax_ub._src.methods import Method, PallasTiles


@dataclasses.dataclass(frozen=True)
class Fallback:
    """A call that runs without overlap although it could overlap, and the reason.

    A call ran as plain `jax.lax`, the kernel that a tuned file chose could not run it,
    or several ranks repeat the work of a layer.

    Attributes:
        label: the call's name.
        reason: why.
    """

    label: str
    reason: str


# The latest calls that run without overlap. Their number is limited, because a process
# may lower programs for weeks.
_FALLBACKS: collections.deque[Fallback] = collections.deque(maxlen=1024)


def record_fallback(label: str, reason: str) -> None:
    """Adds a call that does not overlap, and the reason, to the list of `fallbacks`."""
    _FALLBACKS.append(Fallback(label, reason))


@contextlib.contextmanager
def falling_back(label: str, reason: str) -> Iterator[None]:
    """Records that plain JAX replaces an op of jax_ub inside the `with` block.

    Operations that are traced or lowered in the block have a name scope with label and
    reason, so that a jaxpr or compiled text shows its fallbacks. `fallback_in` reads
    the scope.
    """
    record_fallback(label, reason)
    with plain_by_choice(label, reason):
        yield


def plain_by_choice(label: str, reason: str) -> AbstractContextManager[Any]:
    """Marks operations in the `with` block that the user has chosen to run in JAX.

    `fallback_in` reads the mark. A choice is no fallback, so `fallbacks` does not list
    it.
    """
    return jax.named_scope(_encode("fallback", label, reason))


def fallback_in(scope: str) -> Fallback | None:
    """Returns the label and reason that `falling_back` or `plain_by_choice` marked."""
    return _decode("fallback", scope)


# The reason why several ranks compute the same values in the code that is being traced,
# for example that a mesh axis shards neither tokens nor features. Empty if each rank
# computes different values.
_REPLICATED: contextvars.ContextVar[str] = contextvars.ContextVar(
    "replicated", default=""
)


@contextlib.contextmanager
def replicating(label: str, reason: str) -> Iterator[None]:
    """Marks operations in the `with` block whose work several ranks repeat.

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
    """Returns the reason of the enclosing `replicating`, or "" if there is none."""
    return _REPLICATED.get()


def replicated_in(scope: str) -> Fallback | None:
    """Returns the label and reason in a JAX name scope that `replicating` created."""
    return _decode("replicated", scope)


def is_mark(scope: str) -> bool:
    """Returns whether a JAX name scope was made by this module, not by the user."""
    return any(f"{kind}[" in scope for kind in ("fallback", "replicated"))


def _encode(kind, label, reason):
    # Slashes and quotes are escaped, because name stacks join scopes by "/", and HLO
    # texts have name stacks in quotes.
    texts = (urllib.parse.quote(text, safe="()=,:; ") for text in (label, reason))
    return f"{kind}[{'|'.join(texts)}]"


def _decode(kind, scope):
    found = re.search(rf"{kind}\[([^\]|]*)\|([^\]|]*)\]", scope)
    return found and Fallback(*map(urllib.parse.unquote, found.groups()))


def fallbacks(*, clear: bool = False) -> tuple[Fallback, ...]:
    """Returns the latest 1024 calls that did not overlap as requested, oldest first.

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

    Raises:
        UnknownNameError: if `clear` is not a bool.
    """
    checks.check_flag("fallbacks", "clear", clear)
    found = tuple(_FALLBACKS)
    if clear:
        _FALLBACKS.clear()
    return found


# The kinds of warnings that this process has already shown.
_WARNED: set[str] = set()


def warn_once(kind: str, text: str, page: str) -> None:
    """Warns about a problem, unless this process has warned about its kind before.

    The warning ends with the page of the documentation that explains it.
    """
    if kind not in _WARNED:
        _WARNED.add(kind)
        warn(f"{text} {see(page)}")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that shows the line of the user's program.

    That is the innermost line outside of jax_ub, JAX and Flax, which may call jax_ub
    while they trace.
    """
    frame, stacklevel = sys._getframe(1), 2
    loaded = map(sys.modules.get, ("jax_ub", "jax", "flax", "contextlib"))
    files = (module.__file__ for module in loaded if module is not None)
    skipped = tuple(str(file).removesuffix("__init__.py") for file in files)
    # The loop finds the user's frame. Python 3.11 lacks `skip_file_prefixes`, an
    # argument of `warnings.warn` for this purpose.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(text, category, stacklevel=stacklevel)


@dataclasses.dataclass(frozen=True)
class LoweredCall:
    """A call in a lowered program, with its operands and the method that runs it.

    Attributes:
        call: the `Call`.
        operands: shapes and dtypes of the operands, without their FP8 scales.
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


# The lists to which each lowered call is added: one for each active `recording` block.
_LISTENERS: list[list[LoweredCall]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[LoweredCall]]:
    """Collects all calls that are lowered in the `with` block in a list."""
    found: list[LoweredCall] = []
    _LISTENERS.append(found)
    try:
        yield found
    finally:
        # Removes the list `found` by identity, because `list.remove` might remove
        # another list that is equal.
        _LISTENERS[:] = [one for one in _LISTENERS if one is not found]


def record(
    ctx: Any, call: Any, method: Method, reason: str | None = None, **pallas: Any
) -> None:
    """Adds a call that is being lowered to the lists of all `recording` blocks.

    Called by the lowering rules. Auxiliary calls are left out. `pallas` has the last
    fields of `LoweredCall`.
    """
    if not _LISTENERS or call.is_auxiliary:
        return
    operands = tuple(shape_of(aval) for aval in call.split(ctx.avals_in)[0])
    scope = str(ctx.name_stack)
    lowered = LoweredCall(call, operands, scope, method, reason, **pallas)
    for listener in _LISTENERS:
        listener.append(lowered)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an aval, without its sharding and weak type."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
