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
import warnings
from typing import TYPE_CHECKING, Any

from jax_ub import errors, overlap_config
from jax_ub._src.config.overlap_config import (
    CommOverlapType,
    UserBufferQuantizationMode,
)
from jax_ub._src.lowering_log import fallbacks
from jax_ub._src.methods import Method
from jax_ub._src.rules.linear import (
    all_gather_matmul,
    linear,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jax_ub._src.rules.local_ops import all_reduce, dgrad_add, wgrad_accumulate
from jax_ub._src.runtime.backend import export_safety_checks, register_targets
from jax_ub._src.runtime.communicators import check_communicators
from jax_ub._src.runtime.initialize import (
    destroy_ub,
    get_ub,
    initialize_ub,
    is_ub_initialized,
)
from jax_ub._src.runtime.registry import CommOverlap, CommOverlapP2P
from jax_ub._src.scaled_array import ScaledArray

if TYPE_CHECKING:
    from jax_ub import flax, fp8, ops
    from jax_ub._src.fp8.quantize import quantize
    from jax_ub._src.retrofit.dot_general import dot_general
    from jax_ub._src.retrofit.nnx_overlap import overlap, overlapped
    from jax_ub._src.runtime.memory import MemoryReport, memory_report
    from jax_ub._src.tools.explain.program import explain
    from jax_ub._src.tools.trace.recorder import trace

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

# These modules and names are imported at their first use, so that `import jax_ub` is
# fast and loads no command-line tool.
_LAZY_MODULES = ("flax", "fp8", "ops")
_LAZY_NAMES = {
    "MemoryReport": "jax_ub._src.runtime.memory",
    "dot_general": "jax_ub._src.retrofit.dot_general",
    "explain": "jax_ub._src.tools.explain.program",
    "memory_report": "jax_ub._src.runtime.memory",
    "overlap": "jax_ub._src.retrofit.nnx_overlap",
    "overlapped": "jax_ub._src.retrofit.nnx_overlap",
    "quantize": "jax_ub._src.fp8.quantize",
    "trace": "jax_ub._src.tools.trace.recorder",
}
# Public modules of release 0.1 that are private now; importing one gives a warning.
_DEPRECATED_MODULES = {
    "methods": "jax_ub._src.methods",
    "reference": "jax_ub._src.reference",
    "retrofit": "jax_ub._src.retrofit",
    "rules": "jax_ub._src.rules",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"jax_ub.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    if name in _DEPRECATED_MODULES:
        warnings.warn(
            f"jax_ub.{name} is private and will be removed in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module(_DEPRECATED_MODULES[name])
    raise AttributeError(f"module 'jax_ub' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
