"""What jax_ub raises: every text names the op, the argument, the value and the fix."""

import builtins
import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

import jax


class UbError(Exception):
    """The base of every error that jax_ub raises."""


class ShapeContractError(UbError, ValueError):
    """The call is wrong: shapes, dtypes or the mesh axis do not fit the op."""


class UnknownNameError(UbError, ValueError):
    """A name (of a method, a kind, a configuration) that jax_ub does not know."""


class UnknownArgumentError(UnknownNameError, TypeError):
    """A keyword argument that a layer does not have."""


class UnknownOverlapError(UnknownNameError, KeyError):
    """`get_ub` has no overlap of that name."""

    __str__ = Exception.__str__  # KeyError's would quote the text


class ConfigurationError(UbError, ValueError):
    """What `initialize_ub` or a layer is given is out of range, or contradictory."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """What `initialize_ub` is given is of another type."""


class LifecycleError(UbError, RuntimeError):
    """`initialize_ub` was called twice, or not at all."""


class UnsupportedOverlapError(UbError, NotImplementedError):
    """The call is right, but cannot run in this way or in this place."""


class FusionError(UbError, RuntimeError):
    """A registered fusion does not compute what it took the place of."""


class CommunicatorError(UbError, RuntimeError):
    """A rank did not arrive, failed, or disagreed with its peers."""


class TimeoutError(CommunicatorError, builtins.TimeoutError):
    """A rank waited for its peers until its deadline; also the builtin error."""


_LONGEST_VALUE = 200


def shown(value: object) -> str:
    """Returns the repr of a value for an error: shortened, and whatever its type is.

    The repr of an arbitrary object may raise, recurse or have no end.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


def nearest(name: object, known: Iterable[str]) -> str:
    """Says which known name is closest to `name`, and lists all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return f"{meant}Known: {', '.join(map(repr, known))}."


# What the engine says of a wait that reached its deadline, and of no other.
_OVERDUE = re.compile(r" waited \S+ s for (?!.* when the communicator failed)")


def of_engine(error: Exception) -> "CommunicatorError | None":
    """What the engine's error is in Python, or None if it is of another kind."""
    _, found, message = str(error).partition("CommunicatorError: ")
    return of_failure(message) if found else None


def of_failure(text: str) -> CommunicatorError:
    """What a communicator's failure is in Python, by the engine's reason for it."""
    return (TimeoutError if _OVERDUE.search(text) else CommunicatorError)(text)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Turns the engine's run-time errors into `CommunicatorError`, for host code.

    XLA reports whatever fails inside a program as `jax.errors.JaxRuntimeError`, where
    the results are waited for:

        with ub.errors.raised():
            jax.block_until_ready(step(state))

    Raises:
        TimeoutError: if ranks were missing when the deadline passed.
        CommunicatorError: if the ranks' communication failed in another way.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # A program that runs at once, on the caller's thread, raises ValueError.
        converted = of_engine(error)
        if converted is None:
            raise
        raise converted from error
