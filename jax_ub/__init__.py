"""jax_ub: GEMMs that overlap with their communication, as XLA FFI calls.

Conventions of all docstrings: `M` is the number of tokens, `K` the contracted size, `N`
the output size and `P` the number of ranks. Unless stated otherwise, arrays are one
rank's shards, in f32, bf16 or f16. Names that end in `_s` are in seconds, and names
that end in `_bytes` are in bytes. "Raises" lists the errors of tracing a call. An error
in a running program is a `jax.errors.JaxRuntimeError`, which `ub.errors.raised`
converts to `CommunicatorError`. "Transformer Engine" names the corresponding feature of
NVIDIA's library.
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

# Importing `jax.extend` adds a config option to JAX, after which JAX traces all
# programs again. It is imported here, before any program is traced. The exception is
# `python -m jax_ub`, which imports this package while sys.argv[0] is "-m": `__main__`
# imports `jax.extend`, but not for the launcher, which starts faster without JAX.
if not (sys.argv[:1] == ["-m"] and "jax_ub" in sys.orig_argv):
    import jax.extend  # noqa: F401

if TYPE_CHECKING:
    from jax_ub import errors, flax, fp8, ops, overlap_config
    from jax_ub._src.config.overlap_config import (
        CommOverlapType,
        UserBufferQuantizationMode,
    )
    from jax_ub._src.fp8.quantize import quantize
    from jax_ub._src.lowering_log import fallbacks
    from jax_ub._src.methods import Method
    from jax_ub._src.primitives.collectives import export_safety_checks
    from jax_ub._src.retrofit.dot_general import dot_general
    from jax_ub._src.retrofit.nnx_overlap import overlap, overlapped
    from jax_ub._src.rules.linear import (
        all_gather_matmul,
        linear,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
    from jax_ub._src.rules.local_ops import all_reduce, dgrad_add, wgrad_accumulate
    from jax_ub._src.runtime.backend import register_targets
    from jax_ub._src.runtime.communicators import check_communicators
    from jax_ub._src.runtime.initialize import (
        destroy_ub,
        get_ub,
        initialize_ub,
        is_ub_initialized,
    )
    from jax_ub._src.runtime.memory import MemoryReport, memory_report
    from jax_ub._src.runtime.registry import CommOverlap, CommOverlapP2P
    from jax_ub._src.scaled_array import ScaledArray
    from jax_ub._src.tools.explain.program import explain
    from jax_ub._src.tools.trace.traces import trace

__all__ = [
    "CommOverlap",
    "CommOverlapP2P",
    "CommOverlapType",
    "MemoryReport",
    "Method",
    "ScaledArray",
    "UserBufferQuantizationMode",
    "all_gather_matmul",
    "all_reduce",
    "check_communicators",
    "destroy_ub",
    "dgrad_add",
    "dot_general",
    "errors",
    "explain",
    "export_safety_checks",
    "fallbacks",
    "flax",
    "fp8",
    "get_ub",
    "initialize_ub",
    "is_ub_initialized",
    "linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "memory_report",
    "ops",
    "overlap",
    "overlap_config",
    "overlapped",
    "quantize",
    "register_targets",
    "trace",
    "wgrad_accumulate",
]

# Maps modules in `_src` to the public names that they define. Each name is imported at
# its first use, so that `import jax_ub` is fast and a program loads only what it uses.
_DEFINITIONS = {
    "config.overlap_config": ("CommOverlapType", "UserBufferQuantizationMode"),
    "fp8.quantize": ("quantize",),
    "lowering_log": ("fallbacks",),
    "methods": ("Method",),
    "primitives.collectives": ("export_safety_checks",),
    "retrofit.dot_general": ("dot_general",),
    "retrofit.nnx_overlap": ("overlap", "overlapped"),
    "rules.linear": (
        "all_gather_matmul",
        "linear",
        "matmul_all_reduce",
        "matmul_reduce_scatter",
    ),
    "rules.local_ops": ("all_reduce", "dgrad_add", "wgrad_accumulate"),
    "runtime.backend": ("register_targets",),
    "runtime.communicators": ("check_communicators",),
    "runtime.initialize": (
        "destroy_ub",
        "get_ub",
        "initialize_ub",
        "is_ub_initialized",
    ),
    "runtime.memory": ("MemoryReport", "memory_report"),
    "runtime.registry": ("CommOverlap", "CommOverlapP2P"),
    "scaled_array": ("ScaledArray",),
    "tools.explain.program": ("explain",),
    "tools.trace.traces": ("trace",),
}
_DEFINED_IN = {
    name: f"jax_ub._src.{module}"
    for module, names in _DEFINITIONS.items()
    for name in names
}
_MODULES = ("errors", "flax", "fp8", "ops", "overlap_config")
# Private modules that were public in release 0.1. Their use issues a warning.
_DEPRECATED_MODULES = ("methods", "reference", "retrofit", "rules")


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"jax_ub.{name}")
    elif name in _DEPRECATED_MODULES:
        warnings.warn(
            f"jax_ub.{name} is private and will be removed in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module(f"jax_ub._src.{name}")
    else:
        raise AttributeError(f"module 'jax_ub' has no attribute {name!r}")
    globals()[name] = value  # so that Python finds it without this function
    return value


def __dir__() -> list[str]:
    return __all__
