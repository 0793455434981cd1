"""How a call runs on CUDA devices: by which method, why not, and what XLA is told."""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_ub.methods import Method, Variant
from jax_ub.primitives import exported
from jax_ub.primitives.mesh import Ranks
from jax_ub.runtime import cuda, settings
from jax_ub.runtime.device_groups import ONE_SHOT_BYTES, heap_bytes

# XLA's results have a size.
_LEAST_BYTES = 1
# XLA of jax 0.11 fuses a call of a scan with the update of the slice that its result is
# saved in, and runs it once more for whoever else reads the result. It does not look
# through a barrier. Weight gradients have no other readers, and are to be fused.
_RUNS_TWICE_WHAT_IS_SAVED = jax.__version_info__ < (0, 12)


def method_of(call: Any) -> Method:
    """The method that the engine is told.

    Chunks are pushed into the peers' slots, nobody reads a peer in place: what is
    gathered goes to all peers at once, nearest first (a pipeline; one piece a chunk,
    unless the call says more), and sums go to the rank that owns their rows. A local
    product has no method to choose.
    """
    if not call.axis_name:
        return Method.DIRECT
    if _chooses(call):
        return Method.PIPELINE if call.gathers else Method.RING_EXCHANGE
    return call.method


def leaves_to_xla(call: Any) -> bool:
    """Whether "auto" leaves a call that the engine could run to XLA.

    One rank has nothing to overlap, and XLA tunes the GEMM and fuses what is around it.
    """
    is_of_one_rank = bool(call.axis_name) and call.num_ranks == 1
    return call.method is Method.AUTO and (is_of_one_rank or call.is_of_one_rank)


def variant_of(call: Any, operands: Sequence[Any]) -> Variant:
    """The variant of the schedule that the engine is told.

    Few tokens are summed in one exchange, unless the call says how it is to run. What
    was tuned to be is, unless its slots need more than any heap has that the call fits
    into.
    """
    chooses = call.replicates and _chooses(call)
    if not chooses and call.choice.kernel_options.variant is not Variant.ONE_SHOT:
        return call.choice.kernel_options.variant
    num_elements = math.prod(call.communicated(*operands))
    most = ONE_SHOT_BYTES if chooses else heap_bytes("cuda", num_elements)
    sent = (call.num_ranks - 1) * num_elements * _summed_itemsize(call, operands)
    return Variant.ONE_SHOT if sent <= most else Variant.PLAIN


def _summed_itemsize(call, operands):
    """Of the slots: partial sums of several products are f32, and sums are results."""
    partial = operands[0].dtype.itemsize
    if getattr(call, "num_pairs", 1) > 1:
        partial = np.dtype(np.float32).itemsize
    return max(partial, call.shapes(*operands)[0][1].itemsize)


def _chooses(call):
    """Whether nobody said how it is to run."""
    return bool(call.axis_name) and call.method is Method.AUTO


def why_not(call: Any, ranks: Ranks) -> str | None:
    """Why the CUDA engine cannot run a call; None if it can."""
    if ranks.reason is not None:
        return ranks.reason
    if method_of(call) is Method.DIRECT and call.axis_name:
        return (
            "on CUDA peers' buffers are not mapped; chunks are pushed into slots, by "
            '"ring_exchange", "pipeline" or "external"'
        )
    if call.num_ranks > cuda.MOST_RANKS:
        return (
            f"it has {call.num_ranks} ranks, and the CUDA engine at most "
            f"{cuda.MOST_RANKS}"
        )
    return cuda.why_not() or _why_no_peers(ranks)


def _why_no_peers(ranks):
    """Of the groups of this process; those that span several were connected."""
    for group in ranks.groups:
        own = [d for d in group if d.process_index == jax.process_index()]
        if len(own) == len(group) and all(map(cuda.is_cuda, own)):
            reason = cuda.why_no_peers(own)
            if reason is not None:
                return reason
    return None


def lower(
    ctx: Any, operands: Sequence[Any], call: Any, attributes: dict[str, object]
) -> Sequence[Any]:
    """Emits the custom call, whose last result is the engine's workspace.

    In a program that is exported its last operand is the number of the partition, which
    the device that runs it compares with the one that its rank was lowered for.
    """
    cuda.register_targets()
    numbers = {
        "method": method_of(call).code,
        "variant": variant_of(call, ctx.avals_in).code,
        **call.choice.kernel_options.attributes(),
        "allow_tf32": settings.allow_tf32(),
    }
    attributes = attributes | {name: np.int64(n) for name, n in numbers.items()}
    size_bytes = cuda.workspace_bytes(
        call.target,
        attributes,
        [_array(aval) for aval in ctx.avals_in],
        [_array(aval) for aval in ctx.avals_out],
    )
    workspace = jax.core.ShapedArray(
        (max(size_bytes, _LEAST_BYTES),), np.dtype(np.uint8)
    )
    # Without side effects: all ranks run one program, and what XLA does to its calls it
    # does on all of them. With them XLA of jax 0.11 runs a call of a scan twice: in the
    # fusion that hands it slices, say of the layers' kernels, and once more beside it.
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
