"""The exceptions of jax_ub. Messages name the op, the argument, its value and a fix.

Subclasses of ValueError mean that a call is wrong. Subclasses of NotImplementedError
mean that it is correct but not supported here.
"""

from jax_ub._src.errors import (
    CommunicatorError,
    ConfigurationError,
    ConfigurationTypeError,
    FusionError,
    InputError,
    LifecycleError,
    OutputError,
    ShapeContractError,
    TimeoutError,
    TraceError,
    UbError,
    UnknownArgumentError,
    UnknownNameError,
    UnknownOverlapError,
    UnsupportedOverlapError,
    raised,
)

__all__ = [
    "CommunicatorError",
    "ConfigurationError",
    "ConfigurationTypeError",
    "FusionError",
    "InputError",
    "LifecycleError",
    "OutputError",
    "ShapeContractError",
    "TimeoutError",
    "TraceError",
    "UbError",
    "UnknownArgumentError",
    "UnknownNameError",
    "UnknownOverlapError",
    "UnsupportedOverlapError",
    "raised",
]
