"""Lowers calls for CUDA: chooses method and variant, and emits the custom call."""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_ub._src.methods import Method, Variant
from jax_ub._src.primitives import exported
from jax_ub._src.primitives.mesh import Ranks
from jax_ub._src.runtime import cuda_engine, settings
from jax_ub._src.runtime.device_groups import ONE_SHOT_BYTES, heap_bytes

# The workspace is a result of the custom call, and XLA has no results of 0 bytes.
_LEAST_BYTES = 1
# In a scan, XLA of JAX 0.11 fuses a call with the dynamic-update-slice that saves its
# result, and runs the call a second time for other users of the result. An optimization
# barrier behind the call prevents both. Weight gradients get no barrier: they have no
# other users, so the fusion is wanted.
_RUNS_TWICE_WHAT_IS_SAVED = jax.__version_info__ < (0, 12)


def method_of(call: Any) -> Method:
    """Returns the method with which the CUDA engine runs a call, resolving "auto".

    On CUDA all communication pushes chunks into the peers' slots, so "auto" never
    becomes "direct". An all-gather becomes "pipeline": each rank sends its rows to all
    peers, nearest first, as one chunk unless the call sets `num_splits`. A reduction
    becomes "ring_exchange": partial sums go to the rank that owns the rows. A local
    GEMM always has method "direct".
    """
    if not call.axis_name:
        return Method.DIRECT
    if _chooses(call):
        return Method.PIPELINE if call.gathers else Method.RING_EXCHANGE
    return call.method


def leaves_to_xla(call: Any) -> bool:
    """Returns whether XLA computes a call of method "auto" that the engine could run.

    That is the case for one rank: nothing overlaps there, and XLA tunes the GEMM and
    fuses neighbouring operations into it.
    """
    is_of_one_rank = bool(call.axis_name) and call.num_ranks == 1
    return call.method is Method.AUTO and (is_of_one_rank or call.is_of_one_rank)


def variant_of(call: Any, operands: Sequence[Any]) -> Variant:
    """Returns the schedule variant with which the CUDA engine runs a call.

    A variant changes how a method schedules its transfers, such as a one-shot
    all-reduce.

    An all-reduce of method "auto" is `ONE_SHOT` if each rank sends at most
    `ONE_SHOT_BYTES`. A tuned `ONE_SHOT` is kept unless its slots exceed the smallest
    heap that `initialize_ub` may have allocated for a call of this size.
    """
    chooses = call.replicates and _chooses(call)
    if not chooses and call.choice.kernel_options.variant is not Variant.ONE_SHOT:
        return call.choice.kernel_options.variant
    num_elements = math.prod(call.communicated(*operands))
    most = ONE_SHOT_BYTES if chooses else heap_bytes("cuda", num_elements)
    sent = (call.num_ranks - 1) * num_elements * _summed_itemsize(call, operands)
    return Variant.ONE_SHOT if sent <= most else Variant.PLAIN


def _summed_itemsize(call, operands):
    """Returns the bytes per element that an all-reduce call sends to its peers.

    Slots hold partial sums, f32 for several products and the operands' dtype for one,
    and reduced sums in the result's dtype.
    """
    partial = operands[0].dtype.itemsize
    if getattr(call, "num_pairs", 1) > 1:
        partial = np.dtype(np.float32).itemsize
    return max(partial, call.shapes(*operands)[0][1].itemsize)


def _chooses(call):
    """Returns whether a call communicates and leaves the method to the engine.

    That is method "auto".
    """
    return bool(call.axis_name) and call.method is Method.AUTO


def why_not(call: Any, ranks: Ranks) -> str | None:
    """Returns the reason for which the CUDA engine cannot run a call, or None."""
    if ranks.reason is not None:
        return ranks.reason
    if method_of(call) is Method.DIRECT and call.axis_name:
        return (
            "on CUDA peers' buffers are not mapped; chunks are pushed into slots, by "
            '"ring_exchange", "pipeline" or "external"'
        )
    if call.num_ranks > cuda_engine.MOST_RANKS:
        return (
            f"it has {call.num_ranks} ranks, and the CUDA engine at most "
            f"{cuda_engine.MOST_RANKS}"
        )
    return cuda_engine.why_not() or _why_no_peers(ranks)


def _why_no_peers(ranks):
    """Returns why GPUs of this process cannot access each other's memory, or None.

    Only groups within this process are checked. Groups that span processes were checked
    when they were connected.
    """
    for group in ranks.groups:
        own = [d for d in group if d.process_index == jax.process_index()]
        if len(own) == len(group) and all(map(cuda_engine.is_cuda, own)):
            reason = cuda_engine.why_no_peers(own)
            if reason is not None:
                return reason
    return None


def lower(
    ctx: Any, operands: Sequence[Any], call: Any, attributes: dict[str, object]
) -> Sequence[Any]:
    """Emits the CUDA custom call, which has a workspace as additional last result.

    In an exported program the last operand is the partition id. The device that runs
    the call compares it with the partition id that its rank was lowered for.
    """
    cuda_engine.register_targets()
    numbers = {
        "method": method_of(call).code,
        "variant": variant_of(call, ctx.avals_in).code,
        **call.choice.kernel_options.attributes(),
        "allow_tf32": settings.allow_tf32(),
    }
    attributes = attributes | {name: np.int64(n) for name, n in numbers.items()}
    size_bytes = cuda_engine.workspace_bytes(
        call.target,
        attributes,
        [_array(aval) for aval in ctx.avals_in],
        [_array(aval) for aval in ctx.avals_out],
    )
    workspace = jax.core.ShapedArray(
        (max(size_bytes, _LEAST_BYTES),), np.dtype(np.uint8)
    )
    # Unlike on CPUs, has_side_effect is False, so XLA may move or merge these calls.
    # This is safe, because all ranks run the same compiled program. With a side effect,
    # XLA of JAX 0.11 would run a call inside a scan twice: in the fusion that slices
    # its operands, such as the stacked kernels of the layers, and outside the fusion.
    rule = jax.ffi.ffi_lowering(
        call.target,
        operand_output_aliases=call.aliases(ctx.avals_in),
    )
    ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    if "devices" in attributes:
        ctx, operands = exported.with_partition(ctx, operands)
    *results, _ = rule(ctx, *operands, **attributes)
    if _RUNS_TWICE_WHAT_IS_SAVED and call.is_batchable:
        return hlo.OptimizationBarrierOp(cast(list[ir.Value], results)).results
    return results


def _array(aval):
    return str(aval.dtype), tuple(aval.shape)
