"""Stand-ins for libraries that intercept functions of JAX while a model is traced."""

import contextlib
import sys
import types
from unittest import mock


@contextlib.contextmanager
def replaced_code(function, replacement):
    """Replaces the code of a function, as Qwix does.

    Args:
        function: a function of JAX.
        replacement: called with the original and the arguments.
    """
    original = types.FunctionType(function.__code__, function.__globals__)
    original.__kwdefaults__, original.__defaults__ = (
        function.__kwdefaults__,
        function.__defaults__,
    )

    # The code runs with the globals of `function` and without a closure.
    def stand_in(*args, **kwargs):
        import sys

        return sys.replacement_of_a_test(*args, **kwargs)

    sys.replacement_of_a_test = lambda *a, **k: replacement(original, *a, **k)
    function.__code__ = stand_in.__code__
    try:
        yield
    finally:
        function.__code__ = original.__code__
        del sys.replacement_of_a_test


@contextlib.contextmanager
def replaced_attribute(module, name, replacement):
    """Replaces a function in a module, as `unittest.mock` does."""
    original = getattr(module, name)

    def stand_in(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    with mock.patch.object(module, name, stand_in):
        yield


def twice(original, *args, **kwargs):
    """Returns twice the result of the original."""
    return 2 * original(*args, **kwargs)
