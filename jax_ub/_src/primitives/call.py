"""`Call`: makes a JAX primitive for each FFI target, and lowers it.

A primitive's only parameter is a `Call`: a frozen, hashable description of everything
but the operands, equal on all ranks. In the jaxpr the primitive has no effects, so that
DCE, remat and partial evaluation treat it as an ordinary function. In HLO the CPU's
custom call has a side effect, so that XLA does not merge, move or remove calls that
every rank must run.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from jax_ub._src import lowering_log
from jax_ub._src.config.tuned_file import TunedTable
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError
from jax_ub._src.methods import DEFAULT_SPLITS, Method, MethodChoice
from jax_ub._src.primitives import batching as folding
from jax_ub._src.primitives import exported, on_cuda, varying
from jax_ub._src.primitives.mesh import Ranks, check_manual, find_ranks
from jax_ub._src.primitives.sizes import tuned_key
from jax_ub._src.runtime import cpu_engine, registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All parameters of one engine call except its operands, as static jaxpr data.

    A subclass sets `target`, adds the target's options as fields, and defines the
    shapes of the results and their reference implementation in plain `jax.lax`.
    """

    target: ClassVar[str]
    primitive: ClassVar[Primitive]

    axis_name: tuple[str, ...] = ()  # empty for a local op
    num_ranks: int = 1
    choice: MethodChoice
    tuned: TunedTable | None = None  # replaces `choice` for the sizes that it contains
    label: str  # the call's name in errors, fallbacks and traces
    # Whether this is the local GEMM of a call over a mesh axis of one rank.
    is_of_one_rank: bool = False
    is_named: bool = False  # whether initialize_ub configured the call's name
    replicated: str = ""  # why several ranks compute the same results, or empty

    def __init_subclass__(cls):
        """Makes a JAX primitive for a subclass that sets `target`, the FFI target."""
        if "target" in vars(cls):
            cls.primitive = _make_primitive(cls.target)

    @property
    def method(self) -> Method:
        """Returns the method by which the call overlaps, such as `Method.DIRECT`."""
        return self.choice.method

    def shapes(self, *operands) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Returns the shape and dtype of every result, given the operands' avals."""
        raise NotImplementedError

    def reference(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """Computes the results by plain `jax.lax`, as fallback and test oracle."""
        raise NotImplementedError

    def on_one_rank(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """Computes the results on a mesh axis of one rank, without communication."""
        raise NotImplementedError

    @property
    def local(self) -> dict[str, Any]:
        """Returns the keyword arguments of the local GEMMs that `on_one_rank` runs."""
        has_method = self.method not in (Method.AUTO, Method.XLA)
        method = Method.DIRECT if has_method else self.method
        return {
            "choice": MethodChoice(method, is_explicit=self.choice.is_explicit),
            "tuned": self.tuned,
            "label": self.label,
            "is_of_one_rank": True,
            "replicated": self.replicated,
        }

    def options(self) -> dict[str, int | np.float32]:
        """Returns FFI attributes that only this target has, such as `num_pairs`.

        Integers and bools become i64 attributes, `np.float32` becomes f32.
        """
        return {}

    def aliases(self, operands) -> dict[int, int]:
        """Returns {operand index: result index} for results that overwrite operands."""
        return {}

    def communicated(self, *operands) -> tuple[int, ...]:
        """Returns the shape of the array that all ranks exchange, `[..., rows, K]`.

        It is the array after an all-gather, or before a reduce-scatter or
        all-reduce.

        It is the tensor after an all-gather, or before a reduce-scatter or all-reduce.
        """
        raise NotImplementedError

    def is_activation(self, index: int) -> bool:
        """Returns whether operand `index` is an activation `[..., rows, features]`.

        Such an operand takes any number of leading batch axes.
        """
        return index == 0

    def is_replicated(self, index: int) -> bool:
        """Returns whether all ranks must pass an equal array as operand `index`."""
        return False

    @property
    def gathers(self) -> bool:
        """Whether the collective is an all-gather; otherwise it sums over the ranks."""
        return False

    @property
    def communicates_only(self) -> bool:
        """Whether the call is only a collective, such as an all-gather; no GEMM."""
        return False

    @property
    def replicates(self) -> bool:
        """Whether all ranks get equal results, as from an all-reduce."""
        return False

    @property
    def is_batchable(self) -> bool:
        """Whether `jax.vmap` can run the call once, with the mapped axis as batch axis.

        Otherwise `jax.vmap` calls it in a loop. A call is batchable if batch
        axes of the activations are also batch axes of the results.

        Then `jax.vmap` adds a batch axis; otherwise it runs a loop.
        """
        return True

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the call: by its primitive, by `jax.lax`, or without communication.

        All operands are promoted to vary over the union of their varying mesh axes,
        except that replicated operands do not vary over `axis_name`.
        """
        operands = self._promote(operands)
        if self.axis_name and self.num_ranks == 1 and self.method is not Method.XLA:
            results = self.on_one_rank(*operands)
            if self.replicates:
                results = [varying.same_on(self.axis_name, y) for y in results]
            return tuple(results)
        call = self._tuned(operands)
        if call.method is Method.XLA:
            return tuple(call.reference(*operands))
        return tuple(call.primitive.bind(*operands, call=call))

    def _tuned(self, operands):
        """Replaces "auto" by the method measured fastest for these operand sizes."""
        if self.tuned is None:
            return self
        case = tuned_key(self, operands)
        found = None if case is None else self.tuned.find(case)
        return dataclasses.replace(self, choice=found or self.choice, tuned=None)

    def _promote(self, operands):
        axes = varying.axes_of(*operands)
        own = frozenset(self.axis_name)
        return [
            varying.promote(x, axes - own if self.is_replicated(i) else axes)
            for i, x in enumerate(operands)
        ]


def _make_primitive(target):
    primitive = Primitive(target)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, call: _run(call, *operands))
    primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = _refuse_jvp
    # Not cacheable: each call site is lowered separately, so that each is recorded.
    mlir.register_lowering(primitive, _lower_on_cpu, platform="cpu", cacheable=False)
    mlir.register_lowering(primitive, _lower_on_cuda, platform="cuda", cacheable=False)
    mlir.register_lowering(primitive, _lower_elsewhere, cacheable=False)
    return primitive


@functools.partial(jax.jit, static_argnums=0)
def _run(call, *operands):
    return call.primitive.bind(*operands, call=call)


def _abstract_eval(*operands, call):
    check_manual(call.label)
    _check_capacity(call, operands)
    axes = varying.axes_of(*operands)
    if call.replicates:
        axes -= frozenset(call.axis_name)
    return [
        varying.result_aval(shape, dtype, axes, operands[0])
        for shape, dtype in call.shapes(*operands)
    ]


def _check_capacity(call, operands):
    """Raises an error if a call communicates more elements than the buffers hold.

    `initialize_ub` has allocated the buffers for the call's mesh axis.

    A call without a configured name is rejected only if it needs the buffers and must
    not fall back. In one process the CPU engine needs no buffers, but only the lowering
    knows the platform; it checks again.
    """
    initialized_axis = registry.on_axis(call.axis_name, call.num_ranks)
    if initialized_axis is None:
        return
    may_run = call.choice.may_fall_back or not initialized_axis.spans_processes
    if call.is_named or not may_run:
        reason = _why_too_large(call, initialized_axis, operands)
        if reason is not None:
            raise ShapeContractError(f'{call.label}: {reason}, or pass method="xla".')


def _why_too_large(call, initialized_axis, operands):
    pipelines = call.method is Method.PIPELINE
    num_splits = (call.choice.num_splits or DEFAULT_SPLITS) if pipelines else 1
    return initialized_axis.why_too_large(call.communicated(*operands), num_splits)


def _why_no_room(call, operands, *, needs_buffers):
    """Returns why a call does not fit the buffers of its mesh axis; None if it does.

    Args:
        call: the call.
        operands: avals of its operands.
        needs_buffers: whether the platform needs buffers within one process, too.
    """
    initialized_axis = registry.on_axis(call.axis_name, call.num_ranks)
    if initialized_axis is None or not (
        initialized_axis.spans_processes or needs_buffers
    ):
        return None
    return _why_too_large(call, initialized_axis, operands)


def _batch(primitive, operands, dims, *, call):
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    if call.is_batchable and all(call.is_activation(i) for i in mapped):
        folded = [i for i in range(len(operands)) if call.is_activation(i)]
        operands = list(operands)
        moved = folding.fold([operands[i] for i in folded], [dims[i] for i in folded])
        for i, operand in zip(folded, moved, strict=True):
            operands[i] = operand
        results = primitive.bind(*operands, call=call)
    else:
        bind = functools.partial(primitive.bind, call=call)
        results = folding.loop(bind, operands, dims)
    return results, [0] * len(results)


def _refuse_jvp(operands, tangents, *, call):
    raise UnsupportedOverlapError(
        f"{call.label}: forward-mode differentiation and second derivatives are not "
        "supported. Differentiate once, with jax.grad or jax.vjp."
    )


def _lower_on_cpu(ctx, *operands, call):
    # Checked again, since initialize_ub may have run after the call was traced.
    _check_capacity(call, ctx.avals_in)
    ranks = find_ranks(ctx, call.label, call.axis_name, takes_partitions=True)
    reason = ranks.reason or _why_no_room(call, ctx.avals_in, needs_buffers=False)
    if reason is not None:
        return _lower_to_reference(ctx, operands, call, reason)
    automatic = call.method is Method.AUTO
    lowering_log.record(ctx, call, Method.DIRECT if automatic else call.method)
    cpu_engine.register_targets()
    channel = _channel(ctx, ranks)
    if channel:
        cpu_engine.load().begin_program(channel)
    rule = jax.ffi.ffi_lowering(
        call.target,
        has_side_effect=True,
        operand_output_aliases=call.aliases(ctx.avals_in),
    )
    devices = exported.devices(ctx, ranks)
    if devices:
        ctx, operands = exported.with_partition(ctx, operands)
    attributes = {**_attributes(call, ranks), **devices, "channel": channel}
    # An exported program may run in a process whose communicators have a different
    # generation.
    if channel and not devices:
        attributes["generation"] = np.int64(ranks.generation)
    return rule(ctx, *operands, **attributes)


def _lower_on_cuda(ctx, *operands, call):
    _check_capacity(call, ctx.avals_in)
    ranks = find_ranks(ctx, call.label, call.axis_name)
    reason = on_cuda.why_not(call, ranks)
    reason = reason or _why_no_room(call, ctx.avals_in, needs_buffers=True)
    if reason is not None:
        return _lower_to_reference(ctx, operands, call, reason)
    if on_cuda.leaves_to_xla(call):
        lowering_log.record(ctx, call, Method.XLA, "one rank: it is a GEMM of XLA's")
        rule = mlir.lower_fun(call.reference, multiple_results=True)
        return rule(ctx, *operands)
    lowering_log.record(ctx, call, on_cuda.method_of(call))
    attributes = {
        **_attributes(call, ranks),
        **exported.devices(ctx, ranks),
        "channel": _channel(ctx, ranks),
    }
    return on_cuda.lower(ctx, operands, call, attributes)


def _channel(ctx, ranks):
    # The engines of all processes find the calls that belong together by this text. It
    # is the HLO module's name and a channel number, equal in every process.
    if not ranks.spans_processes:
        return ""
    module = ctx.module_context.module.operation.attributes["sym_name"]
    return f"{ir.StringAttr(module).value}/{ctx.module_context.new_channel()}"


def _lower_elsewhere(ctx, *operands, call):
    find_ranks(ctx, call.label, call.axis_name)
    platforms = ", ".join(ctx.module_context.platforms)
    return _lower_to_reference(ctx, operands, call, f"no engine for {platforms}")


def _lower_to_reference(ctx, operands, call, reason):
    if not call.choice.may_fall_back:
        raise UnsupportedOverlapError(
            f'{call.label}: method "{call.method.value}" cannot run: {reason}. Pass '
            'method="auto", which falls back to plain jax.lax, or method="xla".'
        )
    lowering_log.record_fallback(call.label, reason)
    lowering_log.record(ctx, call, Method.XLA, reason)
    rule = mlir.lower_fun(call.reference, multiple_results=True)
    return rule(ctx, *operands)


def _attributes(call: Call, ranks: Ranks) -> dict[str, object]:
    options = {
        name: value if isinstance(value, np.float32) else np.int64(value)
        for name, value in call.options().items()
    }
    return {
        "method": np.int64(call.method.code),
        "num_ranks": np.int64(call.num_ranks),
        "num_splits": np.int64(call.choice.num_splits),
        "variant": np.int64(call.choice.kernel_options.variant.code),
        "ranks": ranks.table,
        "label": call.label,
        **options,
    }
