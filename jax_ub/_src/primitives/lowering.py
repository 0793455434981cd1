"""Lowers calls for CPU and CUDA, or to plain `jax.lax` with a recorded reason.

Normally a device finds its rank by its device id. An exported program may run on other
devices than it was lowered for, or on the same devices in another order. There XLA's
partition id tells which device of the lowering the running device replaces. The CPU
engine reads its rank from the partition id. On GPUs, where the host cannot read the
value, it is only compared with the expected partition id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_ub._src import dtypes, lowering_log, scaled_array
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.methods import DEFAULT_SPLITS, Method, Variant, auto_on_gpus
from jax_ub._src.primitives.mesh import RUN_PLAIN, Ranks, find_ranks
from jax_ub._src.runtime import (
    communicators,
    cpu_engine,
    cuda_engine,
    hosts,
    registry,
    settings,
)
from jax_ub._src.runtime.communicators import ONE_SHOT_BYTES, heap_bytes

if TYPE_CHECKING:
    from jax_ub._src.primitives.call import Call

# Minimum size of a call's workspace, which is a result of the custom call. XLA does not
# support results of 0 bytes.
_LEAST_BYTES = 1
# Whether this JAX version needs an optimization barrier after each call. Without the
# barrier, XLA may fuse a call in a scan with the dynamic-update-slice that saves its
# result, and run the call again for other users of the result. The result of a weight
# gradient has no other users, so its call needs no barrier.
_RUNS_TWICE_WHAT_IS_SAVED = jax.__version_info__ < (0, 12)


def _lower_on_cpu(ctx, *operands, call):
    # The sizes of the communication buffers are checked again, because `initialize_ub`,
    # which allocates the buffers, may have run after tracing.
    avals, _ = call.split(ctx.avals_in)
    check_capacity(call, avals)
    ranks = find_ranks(ctx, call.label, call.axis_name, takes_partitions=True)
    reason = cpu_engine.why_not() or ranks.reason
    reason = reason or _why_no_room(call, avals, needs_buffers=False)
    if call.method is Method.XLA:
        reason = reason or _instead_of_pallas(call, "the program is lowered for CPUs")
    if reason is not None:
        return _lower_to_reference(ctx, operands, call, reason)
    if call.num_ranks > 1:
        _warn_of_few_threads(ranks)
    method = Method.DIRECT if call.method is Method.AUTO else call.method
    lowering_log.record(ctx, call, method)
    cpu_engine.register_targets()
    variant = call.choice.kernel_options.variant
    attributes = _attributes(ctx, call, ranks, method, variant)
    channel = attributes["channel"]
    if channel:
        cpu_engine.load().begin_program(channel)
    # The generation is the number of the communicator for which the program is lowered.
    # The engine rejects programs of an earlier communicator. An exported program, which
    # has "devices", has no generation, because another process may run it.
    if channel and "devices" not in attributes:
        attributes["generation"] = np.int64(ranks.generation)
    return _emit(ctx, operands, call, attributes, has_side_effect=True)


def _warn_of_few_threads(ranks):
    """Warns if XLA has too few threads for this process's devices, which may hang."""
    own = [d for d in ranks.devices if d.process_index == jax.process_index()]
    reason = hosts.why_few_pool_threads(len(own) or len(ranks.ids))
    if reason is not None:
        page = "docs/troubleshooting.md#ranks-that-fail-or-wait"
        lowering_log.warn_once("few threads", f"jax_ub: {reason}", page)


def _lower_on_cuda(ctx, *operands, call):
    operand_avals, _ = call.split(ctx.avals_in)
    check_capacity(call, operand_avals)
    ranks = find_ranks(ctx, call.label, call.axis_name)
    reason = _cuda_unsupported_reason(call, ranks)
    if call.has_scales:
        reason = reason or _why_no_fp8(ctx, call, ranks)
    reason = reason or _why_no_room(call, operand_avals, needs_buffers=True)
    if reason is not None:
        return _lower_to_reference(ctx, operands, call, reason)
    if call.execution.is_of_one_rank and call.method is Method.AUTO:
        # On one rank, there is no communication to overlap. XLA can tune its own GEMM
        # and fuse it with neighboring operations.
        lowering_log.record(ctx, call, Method.XLA, "one rank: it is a GEMM of XLA's")
        return mlir.lower_fun(call.plain, multiple_results=True)(ctx, *operands)
    why_not_pallas = ""
    tiles = call.choice.pallas
    if tiles is not None:
        from jax_ub._src.primitives import pallas  # only for GPUs: loaded at first use

        why_not_pallas = pallas.why_not_call(ctx, call, ranks, tiles) or ""
        if not why_not_pallas:
            return _behind_barrier(pallas.lower(ctx, operands, call, tiles))
        reason = _instead_of_pallas(call, why_not_pallas)
        if call.method is Method.XLA:
            return _lower_to_reference(ctx, operands, call, reason)
        lowering_log.record_fallback(call.label, reason)
    return _lower_to_cuda_engine(ctx, operands, call, ranks, why_not_pallas)


def _lower_to_cuda_engine(ctx, operands, call, ranks, why_not_pallas):
    operand_avals, _ = call.split(ctx.avals_in)
    from jax_ub._src.prediction import estimate  # only for GPUs: loaded at first use

    op, M, K, N = call.global_sizes(operand_avals)
    prediction = estimate.estimate_on_gpus(
        op,
        call.choice,
        (M, K, N, call.num_ranks),
        operand_avals[0].dtype,
        ranks.devices,
    )
    reason = None if prediction is None else prediction.why_xla_is_faster
    if reason is not None:
        return _lower_to_reference(ctx, operands, call, reason)
    method = _cuda_method(call)
    variant = cuda_variant(call, operand_avals)
    numbers = {
        **call.choice.kernel_options.attributes(),
        "allow_tf32": settings.allow_tf32(),
    }
    given_ctx, given_operands, given_call = ctx, operands, call
    if call.has_scales:
        transposes = cuda_engine.needs_contiguous_fp8(_gpus(ranks))
        numbers["transposes_fp8"] = transposes
        ctx, operands, call = _with_converted_kernels(
            ctx, operands, call, transposes=transposes
        )
    attributes = _attributes(ctx, call, ranks, method, variant)
    attributes |= {name: np.int64(number) for name, number in numbers.items()}
    avals = ctx.avals_in, ctx.avals_out
    arrays = ([(str(a.dtype), tuple(a.shape)) for a in each] for each in avals)
    try:
        size_bytes = cuda_engine.workspace_bytes(call.op, attributes, *arrays)
    except NotImplementedError as error:  # cuBLASLt cannot multiply by these scales
        return _lower_to_reference(given_ctx, given_operands, given_call, str(error))
    lowering_log.record(given_ctx, given_call, method, why_not_pallas=why_not_pallas)
    cuda_engine.register_targets()
    workspace = jax.core.ShapedArray(
        (max(size_bytes, _LEAST_BYTES),), np.dtype(np.uint8)
    )
    ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    # The calls on GPUs have no side effect, so XLA may move or merge them. This is safe
    # because all ranks run the same compiled program. If a call inside a scan had a
    # side effect, XLA of JAX 0.11 would run it twice: once in the fusion that slices
    # its operands from stacked arrays, and once outside of this fusion.
    *results, workspace = _emit(ctx, operands, call, attributes, has_side_effect=False)
    if prediction is not None:
        _tell_scheduler(workspace.owner, prediction.seconds)
    return results if call.contracts_rows else _behind_barrier(results)


def _behind_barrier(results):
    if not _RUNS_TWICE_WHAT_IS_SAVED:
        return results
    return hlo.OptimizationBarrierOp(cast(list[ir.Value], results)).results


def _instead_of_pallas(call, reason):
    """Returns a text that says why JAX's Pallas kernel does not run a call."""
    choice = dataclasses.replace(call.choice, pallas=None)
    return (
        f"JAX's Pallas kernel, the fastest by a tuned file, cannot run it: {reason}. "
        f"{choice} runs it"
    )


def lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Sequence[Any]:
    """Lowers a call for the program's platform, or to plain JAX for several platforms.

    A rule for each platform would not do: for several platforms, JAX 0.10 to 0.12 can
    only lower primitives with one rule, unless it caches the lowering.
    """
    platforms = ctx.platforms or ctx.module_context.platforms
    names = ", ".join(platforms)
    rule = {"cpu": _lower_on_cpu, "cuda": _lower_on_cuda}.get(names)
    if rule is not None:
        return rule(ctx, *operands, call=call)
    find_ranks(ctx, call.label, call.axis_name)  # raises an error for a wrong mesh
    reason = f"no engine for {names}"
    if len(platforms) > 1:
        reason = (
            f"it is exported for several platforms, {names}; export it once for each"
        )
    return _lower_to_reference(ctx, operands, call, reason)


def _lower_to_reference(ctx, operands, call, reason):
    if not call.choice.may_fall_back:
        raise UnsupportedOverlapError(
            f'{call.label}: method "{call.method.value}" cannot run: {reason}. Pass '
            'method="auto", which falls back to plain jax.lax, or method="xla".'
        )
    if call.is_auxiliary:
        return mlir.lower_fun(call.plain, multiple_results=True)(ctx, *operands)
    lowering_log.record(ctx, call, Method.XLA, reason)
    causes = {
        communicators.UNCONNECTED: "docs/processes.md",
        registry.TOO_SMALL: "docs/initialize_ub.md",
    }
    for cause, page in causes.items():
        if cause in reason:
            text = f"{call.label} runs as plain jax.lax: {reason}"
            lowering_log.warn_once(cause, f"{text}, or {RUN_PLAIN}.", page)

    def plain(*operands):
        with lowering_log.falling_back(call.label, reason):
            return call.plain(*operands)

    return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)


def _emit(ctx, operands, call, attributes, *, has_side_effect):
    """Emits the custom call. Exported programs also pass XLA's partition id to it."""
    rule = jax.ffi.ffi_lowering(
        call.primitive.name,
        has_side_effect=has_side_effect,
        operand_output_aliases=call.aliases(call.split(ctx.avals_in)[0]),
    )
    if "devices" in attributes:
        partition = jax.core.ShapedArray((), np.dtype(np.uint32))
        ctx = ctx.replace(avals_in=[*ctx.avals_in, partition])
        operands = (*operands, hlo.partition_id())
    return rule(ctx, *operands, **attributes)


def _tell_scheduler(operation, seconds):
    """Tells XLA's latency-hiding scheduler how long a custom call takes.

    On Hopper and Blackwell, the scheduler assumes that custom calls without this time
    take almost none, so it would not hide collectives behind them.
    """
    latency = ir.StringAttr.get(str(round(1e9 * seconds)))
    operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"latency_metadata": latency}
    )


def _attributes(ctx, call: Call, ranks: Ranks, method: Method, variant: Variant):
    options = {
        name: (np.float32 if isinstance(value, float) else np.int64)(value)
        for name, value in call.options().items()
    }
    attributes = {
        "method": np.int64(method.code),
        "num_ranks": np.int64(call.num_ranks),
        "num_splits": np.int64(call.choice.num_splits),
        "variant": np.int64(variant.code),
        "ranks": np.array(ranks.table, np.int64),
        "label": call.label,
        **options,
        "channel": _channel(ctx, ranks),
    }
    # Exported programs, and programs lowered for an abstract mesh, contain the id of
    # each partition's device. At run time, a rank uses XLA's partition id to find its
    # device's id. Other programs do not contain these ids.
    for_export = ctx.module_context.lowering_parameters.for_export
    if ranks.ids and (for_export or not ranks.devices):
        attributes["devices"] = np.array(ranks.ids, np.int64)
    return attributes


def _channel(ctx, ranks):
    # The channel consists of the name of the HLO module and a number. It is equal in
    # all processes, so that their engines can match the calls.
    if not ranks.spans_processes:
        return ""
    module = ctx.module_context.module.operation.attributes["sym_name"]
    return f"{ir.StringAttr(module).value}/{ctx.module_context.new_channel()}"


def check_capacity(call: Call, operands: Sequence[Any]) -> None:
    """Raises an error if a call communicates more elements than its buffers contain.

    `initialize_ub` has allocated the buffers for the call's mesh axis.

    A call without a configured name is rejected only if it needs the buffers and must
    not fall back. In one process the CPU engine needs no buffers, but only the lowering
    knows the platform; it checks again.
    """
    is_named = call.execution.is_named
    if is_named or not call.choice.may_fall_back:
        reason = _why_no_room(call, operands, needs_buffers=is_named)
        if reason is not None:
            raise ShapeContractError(f"{call.label}: {reason}, or {RUN_PLAIN}.")


def _why_no_room(call, operands, *, needs_buffers):
    """Returns why a call exceeds the buffers of its mesh axis, or None if it fits."""
    initialized_axis = registry.on_axis(call.axis_name, call.num_ranks)
    if initialized_axis is None:
        return None
    if not (needs_buffers or initialized_axis.device_groups.any_spans_processes):
        return None
    pipelines = call.method is Method.PIPELINE
    num_splits = (call.choice.num_splits or DEFAULT_SPLITS) if pipelines else 1
    return initialized_axis.why_too_large(call.communicated(*operands), num_splits)


def _cuda_method(call):
    """Returns the method that the CUDA engine runs for a call, which is never "auto".

    A local GEMM always has method "direct".
    """
    if not call.axis_name:
        return Method.DIRECT
    if call.method is Method.AUTO:
        return auto_on_gpus(gathers=call.gathers)
    return call.method


def cuda_variant(call: Call, operands: Sequence[Any]) -> Variant:
    """Returns the CUDA engine's schedule variant: one-shot for a small all-reduce.

    An all-reduce of method "auto" is `ONE_SHOT` if each rank sends at most
    `ONE_SHOT_BYTES`. A tuned `ONE_SHOT` is kept unless its slots exceed the smallest
    heap that `initialize_ub` may have allocated for a call of this size.
    """
    chooses = call.replicates and bool(call.axis_name) and call.method is Method.AUTO
    if not chooses and call.choice.kernel_options.variant is not Variant.ONE_SHOT:
        return call.choice.kernel_options.variant
    num_elements = math.prod(call.communicated(*operands))
    most = ONE_SHOT_BYTES if chooses else heap_bytes("cuda", num_elements)
    sent = (call.num_ranks - 1) * num_elements * _summed_itemsize(call, operands)
    return Variant.ONE_SHOT if sent <= most else Variant.PLAIN


def _summed_itemsize(call, operands):
    """Returns how many bytes per element an all-reduce sends to the peers.

    Slots hold partial sums, f32 for several products and the operands' dtype for one,
    and reduced sums in the result's dtype.
    """
    partial = max(operands[0].dtype.itemsize, 2)  # those of FP8 products have 16 bits
    if getattr(call, "num_pairs", 1) > 1:
        partial = np.dtype(np.float32).itemsize
    return max(partial, call.shapes(*operands)[0][1].itemsize)


def _cuda_unsupported_reason(call, ranks):
    """Returns why the CUDA engine cannot run a call, or None if it can."""
    if ranks.reason is not None:
        return ranks.reason
    if _cuda_method(call) is Method.DIRECT and call.axis_name:
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


def _gpus(ranks):
    """Returns the GPUs that will run a call, or this process's GPUs if unknown."""
    return ranks.devices or cuda_engine.local_devices()


def _why_no_fp8(ctx, call, ranks):
    """Returns why the GPUs of a call cannot multiply its FP8 operands, or None."""
    operands, scales = call.split(ctx.avals_in)
    unit = "tensor"
    if call.has_row_scales:
        is_block = any(scale.dtype == jnp.float8_e8m0fnu for scale in scales)
        unit = "block" if is_block else "row"
    reason = cuda_engine.why_no_fp8(_gpus(ranks), unit)
    if reason is not None:
        return reason
    factors = operands[: call.num_scales]
    wide = [x.dtype for x in factors if x.dtype not in dtypes.FP8]
    if wide:
        return f"cuBLASLt does not multiply FP8 by {wide[0]}"
    num_results = len(ctx.avals_out) - len(call.gathered_scales(scales))
    sizes = [array.shape[-1] for array in (*factors, *ctx.avals_out[:num_results])]
    if call.contracts_rows:
        # The contracted size of a wgrad is the number of rows of all ranks. An operand
        # that the call all-gathers has only this rank's rows, so the size is taken from
        # the operand with the most rows.
        sizes.append(max(math.prod(factor.shape[:-1]) for factor in factors))
    multiple = cuda_engine.load().fp8_multiple
    for size in sizes:
        if size % multiple:
            return (
                f"one of its GEMMs has size {size}, and FP8 on GPUs needs multiples of "
                f"{multiple}"
            )
    return None


def _with_converted_kernels(ctx, operands, call, *, transposes):
    """Converts FP8 kernels to the scales and the layout that cuBLASLt supports.

    cuBLASLt does not multiply by scales that change along the contracted axis. With
    `transposes`, kernels become [out, in], so that the contracted axis is contiguous.
    The engine would convert the kernels, too, but once for each chunk.
    """
    if not call.kernels:
        return ctx, operands, call
    operands, avals = list(operands), list(ctx.avals_in)
    axis = 1 if call.rhs_transposed else 0
    transposes = transposes and axis == 0

    def converted(w, scales):
        if call.has_row_scales and scaled_array.changes_along(scales, w.shape, axis):
            w, scales = scaled_array.converted(w, scales, axis)
        return (w.T, scales.T) if transposes else (w, scales)

    rule = mlir.lower_fun(converted, multiple_results=True)
    for i in call.kernels:
        both = i, len(avals) - call.num_scales + i
        before = [avals[j] for j in both]
        shapes = jax.eval_shape(converted, *before)
        after = [jax.core.ShapedArray(each.shape, each.dtype) for each in shapes]
        context = ctx.replace(avals_in=before, avals_out=after)
        results = rule(context, *(operands[j] for j in both))
        for j, aval, result in zip(both, after, results, strict=True):
            avals[j], operands[j] = aval, result
    if transposes:
        call = dataclasses.replace(call, rhs_transposed=True)
    return ctx.replace(avals_in=avals), operands, call


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
