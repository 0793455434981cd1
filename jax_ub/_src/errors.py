"""The exceptions of jax_ub. Messages name the op, the argument, its value and a fix.

Subclasses of ValueError mean that a call is wrong. Subclasses of NotImplementedError
mean that it is correct but not supported here.
"""

import builtins
import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

# Maps each documentation page to a pattern of error messages. `page_of` uses the first
# pattern that matches. The messages of an op begin with its name, whatever their topic,
# so the pages about topics come before the pages about ops.
_PAGES = {
    "docs/functions.md#environment-variables": r"(^|: )JAX_UB_\w+( =|:)",
    "docs/bench/README.md": r"^bench\b",
    "docs/explain.md": r"^(explain|fallbacks)\b",
    "docs/processes.md": r"^launch\b",
    "docs/simulate.md": r"^(hardware|simulate)\b",
    "docs/trace.md": r"^trace\b",
    "docs/tune.md": r"^(tune|tuned)\b|: tuned file\b",
    "docs/initialize_ub.md": (
        r"^(destroy_ub|get_ub|is_ub_initialized|overlap_config|ub_cfgs)\b"
        r"|\binitialize_ub\b"
        r"|the buffers of axis|has no overlap"
    ),
    "docs/fp8.md": (
        r"\b(fp8\w*|FP8|MXFP8|DelayedScaling|\w+BlockScaling|\w+CurrentScaling|QParams"
        r"|RowwiseScaling|ScaledArray|recipe)\b|^(apply_updates|init_state|quantize\w*)\b"
    ),
    "docs/fsdp.md": r"\bfsdp_axes\b",
    "docs/transformer_engine.md": (
        r"\bub_(bulk|overlap)_\w+|, which is Transformer Engine's\."
    ),
    "docs/megatron.md": r", which is Megatron-LM's\.",
    "docs/retrofit.md": r"^(dot_general|[Oo]verlap)\b|\(layer ['\"]",
    "docs/flax.md": (
        r"^(attention|LayerNormLinear|LayerNormMLP|Linear|MultiHeadAttention"
        r"|TransformerLayer|with_main_grads)\b|^linear\(parallel="
    ),
    "docs/ops.md": (
        r"^(ops|operation|OperationFuser|Sequential|AddExtraInput|AllGather|AllReduce"
        r"|BasicLinear|Bias|ConstantScale|Dropout|GEGLU|GELU|Identity|LayerNorm"
        r"|MakeExtraOutput|Quantize|RMSNorm|ReLU|ReduceScatter|Reshape|SiLU|SwiGLU"
        r"|(Backward|Forward|Userbuffers)\w+|(Basic|Fused)Operation|merge_\w+"
        r"|gradients_of_main_grads"
        r"|fuse_windows|(register_\w+|unregister)_fusion)\b"
    ),
    "docs/functions.md": (
        r"^(all_gather_matmul|all_reduce|dgrad_add|linear|matmul_all_reduce"
        r"|matmul_reduce_scatter|wgrad_accumulate)\b"
    ),
}


def page_of(message: str) -> str | None:
    """Returns the documentation page that explains an error message, or None."""
    text = message.partition("Known: ")[0]  # without the list of known names
    found = (page for page, pattern in _PAGES.items() if re.search(pattern, text))
    return next(found, None)


def see(page: str) -> str:
    """Returns a sentence that refers to a page of the documentation."""
    return f"See {page} in the repository of jax_ub"


class UbError(Exception):
    """Base class of all errors that jax_ub raises.

    If a page of the documentation explains an error, it has a note with the page.
    """

    # The documentation page about all errors of this class. If it is None, `page_of`
    # finds a page by the error's message.
    page: ClassVar[str | None] = None

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        page = self.page or page_of(str(arguments[0]) if arguments else "")
        if page is not None:
            self.add_note(see(page))


class ShapeContractError(UbError, ValueError):
    """Raised if shapes, dtypes or the mesh axis of a call do not fit its op."""


class UnknownNameError(UbError, ValueError):
    """Raised if a name, such as a method's, is unknown, or a flag is not a bool."""


class UnknownArgumentError(UnknownNameError, TypeError):
    """Raised if a layer, an operation or a recipe has no such keyword argument."""


class UnknownOverlapError(UnknownNameError, KeyError):
    """Raised if `get_ub` gets a name that `initialize_ub` has not configured."""

    __str__ = Exception.__str__  # KeyError.__str__ would show the message in quotes


class ConfigurationError(UbError, ValueError):
    """Raised if settings are invalid or contradict each other.

    They are arguments of `initialize_ub`, layers and recipes, and the environment
    variables of jax_ub.
    """


class ConfigurationTypeError(ConfigurationError, TypeError):
    """Raised if an argument of `initialize_ub` has the wrong type."""


class LifecycleError(UbError, RuntimeError):
    """Raised if `initialize_ub` is called twice, or not before a call that needs it."""


class UnsupportedOverlapError(UbError, NotImplementedError):
    """Raised if a call is valid, but its method or its context is not supported.

    An example of the context is a call outside of `jax.shard_map`.
    """


class FusionError(UbError, RuntimeError):
    """Raised if a fusion function is invalid, or changes the basic operations."""


class CommunicatorError(UbError, RuntimeError):
    """Raised if a rank missed a collective call, failed, or made a different call."""

    page = "docs/troubleshooting.md#ranks-that-fail-or-wait"


class TimeoutError(CommunicatorError, builtins.TimeoutError):
    """Raised if a rank waited for its peers until its deadline passed.

    It is also a builtin `TimeoutError`.
    """


class TraceError(UbError, RuntimeError):
    """Raised if two traces are recorded at once, or a trace is read before it ends."""


class InputError(UbError, OSError):
    """Raised if a file cannot be read, for example because it does not exist."""


class OutputError(UbError, OSError):
    """Raised if a file cannot be written, for example because the disk is full."""


# Makes tracebacks and pickles name the exceptions as members of the public module
# `jax_ub.errors`.
for _class in list(vars().values()):
    if isinstance(_class, type) and issubclass(_class, UbError):
        _class.__module__ = "jax_ub.errors"


_LONGEST_VALUE = 200


def shown(value: object) -> str:
    """Returns the repr of a value for an error message, cut to 200 characters.

    It never raises, although the repr of an arbitrary object may fail or recurse.
    """
    try:
        text = repr(value)
    except Exception:  # a user's __repr__ may raise any error
        return f"<{type(value).__name__} without a repr>"
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns a hint: the known name most similar to `name`, and all known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return f"{meant}Known: {', '.join(map(repr, known)) or 'none'}."


# Matches the engine's message about a wait that timed out. It does not match the
# message about a wait that ended because another rank failed.
_OVERDUE = re.compile(r" waited \S+ s for (?!.* when the communicator failed)")


def of_engine(error: Exception) -> "CommunicatorError | None":
    """Returns the `CommunicatorError` for an engine error, or None for other errors."""
    _, found, message = str(error).partition("CommunicatorError: ")
    return of_failure(message) if found else None


def of_failure(text: str) -> CommunicatorError:
    """Returns the `TimeoutError` or `CommunicatorError` for a failure message."""
    return (TimeoutError if _OVERDUE.search(text) else CommunicatorError)(text)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Converts errors that the C++ engine raises in the block to `CommunicatorError`.

    XLA reports the failures of a program as `jax.errors.JaxRuntimeError` or
    `ValueError`, when the caller waits for its results:

        with ub.errors.raised():
            jax.block_until_ready(step(state))

    Transformer Engine: none.

    Raises:
        TimeoutError: if ranks were missing when the deadline passed.
        CommunicatorError: if the ranks' communication failed in another way.
    """
    import jax  # here, since the launcher starts faster without it

    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # XLA raises ValueError instead of JaxRuntimeError if it runs the program
        # synchronously, on the caller's thread.
        converted = of_engine(error)
        if converted is None:
            raise
        raise converted from error
