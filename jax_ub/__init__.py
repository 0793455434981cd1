"""jax_ub: GEMMs that overlap with their communication, as XLA FFI calls.

Conventions of all docstrings: `M` is the number of tokens, `K` the contracted size, `N`
the output size and `P` the number of ranks. Unless stated otherwise, arrays are one
rank's shards, in f32, bf16 or f16. Names that end in `_s` are in seconds, and names
that end in `_bytes` are in bytes. "Raises" lists the errors of tracing a call. An error
in a running program is a `jax.errors.JaxRuntimeError`, which `ub.errors.raised`
converts to `CommunicatorError`. "Transformer Engine" names the corresponding feature of
NVIDIA's library.
"""

from jax_ub import errors as errors
from jax_ub import overlap_config as overlap_config
from jax_ub.explain.program import explain as explain
from jax_ub.initialize import destroy_ub as destroy_ub
from jax_ub.initialize import get_ub as get_ub
from jax_ub.initialize import initialize_ub as initialize_ub
from jax_ub.initialize import is_ub_initialized as is_ub_initialized
from jax_ub.methods import Method as Method
from jax_ub.methods import fallbacks as fallbacks
from jax_ub.overlap_config import CommOverlapType as CommOverlapType
from jax_ub.overlap_config import (
    UserBufferQuantizationMode as UserBufferQuantizationMode,
)
from jax_ub.retrofit.dot_general import dot_general as dot_general
from jax_ub.retrofit.overlap import overlap as overlap
from jax_ub.retrofit.overlap import overlapped as overlapped
from jax_ub.rules.all_gather_matmul import all_gather_matmul as all_gather_matmul
from jax_ub.rules.all_reduce import all_reduce as all_reduce
from jax_ub.rules.dgrad_add import dgrad_add as dgrad_add
from jax_ub.rules.linear import linear as linear
from jax_ub.rules.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
from jax_ub.rules.matmul_reduce_scatter import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from jax_ub.rules.wgrad_accumulate import wgrad_accumulate as wgrad_accumulate
from jax_ub.runtime.communicators import check_communicators as check_communicators
from jax_ub.runtime.exporting import export_safety_checks as export_safety_checks
from jax_ub.runtime.exporting import register_targets as register_targets
from jax_ub.runtime.memory import MemoryReport as MemoryReport
from jax_ub.runtime.memory import memory_report as memory_report
from jax_ub.runtime.overlaps import CommOverlap as CommOverlap
from jax_ub.runtime.overlaps import CommOverlapP2P as CommOverlapP2P
from jax_ub.tracing.record import trace as trace
