"""`CallConfig`: ranks, methods and dtypes of one layer, fixed when it is traced."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from jax_ub._src import arguments, lowering_log, methods
from jax_ub._src import checks as shapes
from jax_ub._src.config.flags import FUSED, OverlapFlags, flags_of
from jax_ub._src.errors import UnsupportedOverlapError, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.parallel import (
    COLUMN,
    DGRAD,
    FPROP,
    PASSES,
    WGRAD,
    KernelShards,
    ParallelMode,
    mode_of,
)
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.primitives.call import Execution
from jax_ub._src.runtime import cuda_engine, registry, settings
from jax_ub._src.runtime.registry import Overlap
from jax_ub._src.runtime.tuned_file import TunedKey, TunedTable

if TYPE_CHECKING:
    from jax_ub._src.fp8.recipes import Recipe

_LOCAL = mode_of(None, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallConfig:
    """Settings of one call of a linear layer: ranks, dtypes and a method for each pass.

    It is hashable, so that it can be a static argument of `jax.jit`, and equal on all
    ranks.

    Attributes:
        label: the layer's name in errors.
        mode: the layer's row in the table of parallel modes. A collective has the
            default, the row of a local GEMM.
        axis_name: the mesh axes of the ranks; empty for a local op.
        num_ranks: the number of ranks.
        choice: method and options of the forward pass, or of the pass that `dgrad` or
            `wgrad` selects.
        dgrad_choice: method and options of the dgrad; None uses `choice`.
        wgrad_choice: method and options of a wgrad that runs separately from the dgrad;
            None uses the dgrad's.
        tuned: the methods measured fastest, by global sizes, for method "auto".
        dtype: dtype of the operands.
        out_dtype: dtype of the result.
        dw_dtype: dtype of the kernel's gradient; None is `dtype`.
        source_dtypes: dtypes from which x and each kernel were quantized, if they are
            FP8; None for an operand whose `source` is None.
        fp8: the recipe by which the layer quantizes its operands, or None.
        rhs_transposed: whether kernels and their gradients are [out, in].
        shards: how FSDP shards the kernels; None if they are whole.
        overlap: whether a GEMM and the collective of its operand or result are one
            primitive. Otherwise they are two: a local GEMM and a collective.
        scale: factor of the products, in the result and in both gradients; 1 with
            `overlap`.
        bias_name: name of the caller's bias argument, for errors.
        ub_name: part of the checkpoint names of the residuals.
        is_vma_checked: whether the surrounding `shard_map` has `check_vma=True`.
        is_mapped: whether `axis_name` is an axis of `jax.vmap`. Then JAX itself
            differentiates the call.
        is_on_cuda: whether the call is traced for CUDA devices.
        is_named: whether `initialize_ub` configured `ub_name`.
        returns_gathered: whether the forward pass returns the gathered x.
        is_x_replicated: whether x has the same value on every rank, by its type.
        replicated: why several ranks compute the same results, or "".
    """

    label: str
    mode: ParallelMode = _LOCAL
    axis_name: tuple[str, ...] = ()
    num_ranks: int = 1
    choice: MethodChoice
    dgrad_choice: MethodChoice | None = None
    wgrad_choice: MethodChoice | None = None
    tuned: TunedTable | None = None
    dtype: np.dtype | None = None
    out_dtype: np.dtype | None = None
    dw_dtype: np.dtype | None = None
    source_dtypes: tuple[np.dtype | None, ...] = ()
    fp8: "Recipe | None" = None
    rhs_transposed: bool = False
    shards: KernelShards | None = None
    overlap: bool = True
    scale: float = 1.0
    bias_name: str = "bias"
    ub_name: str | None = None
    is_vma_checked: bool = False
    is_mapped: bool = False
    is_on_cuda: bool = False
    is_named: bool = False
    is_x_replicated: bool = False
    returns_gathered: bool = False
    replicated: str = ""

    @property
    def method(self) -> Method:
        return self.choice.method

    def with_dtypes(self, dtype, out_dtype=None) -> "CallConfig":
        """Returns a copy with other dtypes. The default of `out_dtype` is `dtype`."""
        out_dtype = dtype if out_dtype is None else out_dtype
        return dataclasses.replace(
            self, dtype=np.dtype(dtype), out_dtype=np.dtype(out_dtype)
        )

    def kernel(self, w) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of the kernel [in, out] whose FSDP shard is w."""
        shapes.check_array(self.label, "w", w)
        shape = list(w.shape)
        if self.shards is not None:
            shape[self.shards.dim] *= lax.axis_size(self.shards.axes)
        if self.rhs_transposed:
            shape.reverse()
        return jax.ShapeDtypeStruct(tuple(shape), w.dtype)

    @property
    def contracted_dim(self) -> int:
        """Returns which dimension of a kernel the forward pass contracts: 0 or 1."""
        return 1 if self.rhs_transposed else 0

    @property
    def dgrad(self) -> "CallConfig":
        """Returns a copy for the dgrad, the GEMM that computes the gradient of x."""
        return self._with_choice(self.dgrad_choice)

    @property
    def wgrad(self) -> "CallConfig":
        """Returns a copy for the wgrad, the GEMM that computes the kernel gradient."""
        return self._with_choice(self.wgrad_choice or self.dgrad_choice)

    def _with_choice(self, choice):
        return self if choice is None else dataclasses.replace(self, choice=choice)

    def with_tuned_method(self, op: str, M: int, K: int, N: int) -> "CallConfig":
        """Replaces method "auto" by the method that was measured as the fastest.

        Other methods are kept. All ranks read the same table, from a file of the `tune`
        command, and look up the same op and global sizes, so they make the same choice.
        """
        if self.method is not Method.AUTO or not self.tuned or self.choice.sends_fp8:
            return self
        key = TunedKey(op, self.num_ranks, M, K, N, str(self.dtype))
        return self._with_choice(self.tuned.find(key))

    @property
    def takes_f64(self) -> bool:
        """Returns whether operands may be f64, because no pass runs on the engine.

        The engine has no f64 GEMM. So forward pass, dgrad and wgrad must all have
        method "xla", which is plain `jax.lax`.
        """
        return all(choice.method is Method.XLA for choice in self._choices)

    @property
    def may_fall_back(self) -> bool:
        """Returns whether all passes may run as plain `jax.lax`, without the engine.

        They may unless the user chose a method other than "auto" and "xla".
        """
        return all(
            choice.may_fall_back or choice.method is Method.XLA
            for choice in self._choices
        )

    @property
    def _choices(self):
        passes = (self.choice, self.dgrad_choice, self.wgrad_choice)
        return [choice for choice in passes if choice is not None]

    @property
    def plain(self) -> "CallConfig":
        """Returns a copy with which forward and backward run by method "xla"."""
        return dataclasses.replace(
            self,
            choice=MethodChoice(Method.XLA, is_explicit=False),
            dgrad_choice=None,
            wgrad_choice=None,
            tuned=None,
        )

    def axes(self, *operands) -> frozenset[str]:
        """Returns the mesh axes over which the operands vary, united with `axis_name`.

        `axis_name` is left out with `check_vma=False`, where values have no vma type.
        """
        own = self.axis_name if self.is_vma_checked else ()
        return vma.axes_of(*jax.tree.leaves(operands)) | frozenset(own)

    def varying(self, *operands) -> frozenset[str]:
        """Returns the axes of `axis_name` over which any of the operands varies."""
        return vma.axes_of(*jax.tree.leaves(operands)).intersection(self.axis_name)

    @property
    def materializes_gather(self) -> bool:
        """Returns whether AG+GEMM stores the gathered operand, for use by the wgrad."""
        return self.gathers_first or self._is_auto_on_gpus

    @property
    def gathers_first(self) -> bool:
        """Returns whether a wgrad all-gathers an operand before its GEMM starts."""
        sends_fp8 = self.choice.sends_fp8
        return not self.overlap or sends_fp8 or self.method.materializes_gather

    @property
    def uses_bulk(self) -> bool:
        """Returns whether the dgrad overlaps with the all-gather of x for the wgrad.

        Used for column-parallel layers. On GPUs "auto" does so, too: there a wgrad
        starts only after all gathered rows have arrived, so a gather within the wgrad
        would overlap with nothing.
        """
        return self.method is Method.BULK or self._is_auto_on_gpus

    @property
    def _is_auto_on_gpus(self):
        is_auto = self.method is Method.AUTO and self.num_ranks > 1
        return is_auto and self.is_on_cuda and not self.choice.sends_fp8

    def partial_dtype(self, num_products: int) -> np.dtype:
        """Returns the dtype of a dgrad's partial sums, before their reduce-scatter.

        The reduce-scatter is bulk: it overlaps with the wgrad. One product on GPUs has
        the operands' dtype, as in GEMM+RS there. Otherwise the partial sums are f32.
        """
        rounded = num_products == 1 and self.is_on_cuda
        return np.dtype(self.dtype if rounded else np.float32)

    @property
    def overlapped(self) -> Execution:
        """Returns the settings for a GEMM that overlaps with its own communication.

        Chunks of its operand or result are sent while other chunks are multiplied.
        """
        return self._over_ranks(self.method.forward)

    @property
    def bulk(self) -> Execution:
        """Returns the settings for a collective that overlaps an independent GEMM."""
        return self._over_ranks(Method.BULK)

    @property
    def collective(self) -> Execution:
        """Returns the settings for a collective that does not overlap with a GEMM."""
        return self._over_ranks(self.method)

    def _over_ranks(self, method):
        return Execution(
            label=self.label,
            choice=self.choice.with_method(method),
            axis_name=self.axis_name,
            num_ranks=self.num_ranks,
            tuned=self.tuned if method is Method.AUTO else None,
            is_named=self.is_named,
            is_mapped=self.is_mapped,
            replicated=self.replicated,
        )

    @property
    def local(self) -> Execution:
        """Returns the settings for a GEMM of the layer that needs no communication.

        All methods of the engine run such a GEMM alike. Without an explicit method the
        GEMM is tuned separately, except if the method is "xla": then it was timed
        together with the plain JAX communication around it.
        """
        is_tuned = self.choice.may_fall_back and self.method is not Method.XLA
        return Execution(
            label=self.label,
            choice=self.choice.for_local_gemm,
            tuned=self.tuned if is_tuned else None,
            is_of_one_rank=bool(self.axis_name) and self.num_ranks == 1,
            replicated=self.replicated,
        )


def call_label(op: str, ub_name: str | None) -> str:
    """Returns the op's name and its `ub_name` or layer path, for error messages."""
    if ub_name is None:
        return op
    kind = "layer" if isinstance(ub_name, registry.LayerName) else "ub_name"
    return f"{op} ({kind} {shown(ub_name)})"


def make_call_config(
    op: str,
    axis_name: str | tuple[str, ...] | None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    **options: Any,
) -> CallConfig:
    """Returns the `CallConfig` of an op that is called inside `jax.shard_map`.

    The method is the argument `method`, else "xla" if `JAX_UB_METHOD` is "xla", else
    the configuration of `ub_name`, else `JAX_UB_METHOD`.

    Args:
        op: the call's name in errors.
        axis_name: the mesh axis of the ranks.
        ub_name: the call's name in `initialize_ub`, or None.
        method: the method that the caller passed, or None.
        **options: keyword arguments of `plan_call_config`.

    Raises:
        ShapeContractError: if the axis is not a manual mesh axis. With method "xla" an
            axis of `jax.vmap` is accepted, too.
        UnsupportedOverlapError: if the method is "bulk", unless `may_be_bulk`.
    """
    label = call_label(op, ub_name)
    is_plain = methods.resolve(label, method, settings.method()) is Method.XLA
    num_ranks = mesh.axis_size(label, axis_name, may_be_mapped=is_plain)
    axes = shapes.axis_tuple(axis_name)
    config = plan_call_config(op, axes, num_ranks, ub_name, method, **options)
    if not mesh.are_manual(axes) or (is_plain and mesh.are_mapped(axes)):
        return dataclasses.replace(config, is_mapped=True)
    return dataclasses.replace(config, is_vma_checked=vma.is_vma_checked(axes))


def plan_call_config(  # noqa: PLR0913, options of a layer
    op: str,
    axes: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None = None,
    method: Method | str | None = None,
    *,
    mode: ParallelMode = _LOCAL,
    may_be_bulk: bool = False,
    is_fp8: bool = False,
    flags: OverlapFlags | None = None,
) -> CallConfig:
    """Chooses the methods of an op's forward, dgrad and wgrad; returns a `CallConfig`.

    The choice is documented at `make_call_config`. Unlike that function, this one needs
    no surrounding `jax.shard_map`, because it takes the number of ranks. A GEMM that
    does not communicate has no axes and one rank. `mode` is described at
    `CallConfig.mode`. The method may be "bulk" only if `may_be_bulk`, for a call that
    is only the backward pass of a column-parallel layer. `flags` are the layer's.
    """
    label = call_label(op, ub_name)
    arguments.check(op, ub_name=ub_name)
    chosen = methods.resolve(label, method, settings.method())
    if axes and chosen is Method.BULK and not may_be_bulk:
        methods.refuse_bulk(label, "method" if method is not None else "JAX_UB_METHOD")
    is_default = method is None and settings.method() is not None
    found = registry.find(label, axes, num_ranks, ub_name, is_fp8=is_fp8)
    # JAX_UB_METHOD=xla disables overlap even for layers that `initialize_ub` has
    # configured by name.
    is_configured = (
        method is None and bool(found) and not (is_default and chosen is Method.XLA)
    )
    is_automatic = chosen is Method.AUTO or is_configured
    is_on_cuda = cuda_engine.is_traced_for()
    # A tuned file, written by the `tune` command, lists the methods that were fastest
    # on JAX's default backend. It does not apply to devices of another platform.
    has_table = is_automatic and is_on_cuda == cuda_engine.is_default()
    table = registry.tuned_table(axes, num_ranks) if has_table else None
    choices = {FPROP: MethodChoice(chosen, is_from_environment=is_default)}
    if is_configured:
        # A dgrad that `initialize_ub` has not configured gets the default method, even
        # if a method is configured for the forward pass.
        choices |= {DGRAD: choices[FPROP], **_choices_by_pass(mode, label, found)}
    # An explicit method takes precedence over the layer's `ub_*` flags.
    # `OverlapFlags.check` has verified that the flags do not contradict the method.
    has_method = methods.resolve(label, method, None) is not Method.AUTO
    if flags is not None and flags.given and not has_method:
        choices |= _choices_with_flags(mode, label, flags, choices, found)
    return CallConfig(
        label=label,
        mode=mode,
        axis_name=axes,
        num_ranks=num_ranks,
        choice=choices[FPROP],
        dgrad_choice=choices.get(DGRAD),
        wgrad_choice=choices.get(WGRAD),
        tuned=table,
        ub_name=ub_name,
        is_on_cuda=is_on_cuda,
        is_named=bool(found),
        replicated=lowering_log.replicated(),
    )


def _choices_by_pass(mode, label, found):
    """Returns the methods that `initialize_ub` configured for the passes of a layer."""
    choices = {}
    for direction in PASSES:
        overlap = found.get(direction)
        if overlap is None or not mode.communications(direction):
            continue
        _check_communication(mode, label, direction, overlap)
        # A wgrad that the user has not configured runs with the dgrad's method.
        if direction != WGRAD or overlap.is_configured:
            config = overlap.config
            choices[direction] = MethodChoice(
                Method(config.method),
                config.num_splits,
                *(config.kernel_options, overlap.sends_fp8),
                is_explicit=overlap.is_configured,
            )
    return choices


def _check_communication(mode, label, direction, overlap: Overlap):
    possible = mode.communications(direction)
    found = (overlap.comm_type, overlap.method == Method.BULK.value)
    if found in {(one.comm_type, one.is_bulk) for one in possible}:
        return
    wanted = " or ".join(map(str, possible))
    raise UnsupportedOverlapError(
        f"{label}: overlap {shown(overlap.name)} is configured for "
        f'{overlap.comm_type.value} with method "{overlap.method}", but the '
        f"{direction} of {mode.function_name} communicates {wanted}. Use another "
        f"ub_name, configure {shown(overlap.name)} for it, or pass method=."
    )


def _choices_with_flags(mode, label, flags, choices, found):
    """Returns the methods that flags such as `ub_overlap_ag` select for each pass."""
    if not (mode.sequence_parallel and mode.parallel):
        return {}  # the layer neither gathers nor scatters
    # Raises an error if a flag contradicts the method that `initialize_ub` configured
    # for a pass. A flag of the dgrad also applies to the wgrad, which has the dgrad's
    # method unless the wgrad is configured separately.
    for direction, passes in ((FPROP, (FPROP,)), (DGRAD, (DGRAD, WGRAD))):
        overlap = found.get(direction)
        if overlap is None or not overlap.is_configured:
            continue
        source = f'ub_cfgs["{overlap.name}"] with method "{overlap.method}"'
        for name in flags_of(mode, passes):
            flags.check_method(label, name, Method(overlap.method), source)
    forward, dgrad = choices[FPROP], choices.get(DGRAD, choices[FPROP])
    if mode.parallel == COLUMN:
        return {
            FPROP: _flagged(forward, flags.ub_overlap_ag, gathers=True),
            DGRAD: _column_dgrad(dgrad, flags),
        }
    return {
        FPROP: _flagged(forward, flags.ub_overlap_rs, gathers=False),
        DGRAD: _flagged(dgrad, flags.ub_overlap_ag, gathers=True),
    }


def _flagged(choice, flag, *, gathers):
    """Returns the method of a pass after applying the layer's `ub_*` flag for the pass.

    None keeps `choice`, False selects plain JAX, and True a method that overlaps the
    GEMM with an all-gather if `gathers`, or else with a reduce-scatter.
    """
    if flag is None:
        return choice
    if not flag:
        return MethodChoice(Method.XLA)
    if choice.method in FUSED:
        return dataclasses.replace(choice, is_explicit=True)
    return MethodChoice(_engine_method(gathers=gathers))


def _engine_method(*, gathers):
    """Returns the engine's default method for an all-gather or a reduce-scatter.

    Unlike "auto", this method never falls back to plain XLA.
    """
    if not cuda_engine.is_traced_for():
        return Method.DIRECT
    return methods.auto_on_gpus(gathers=gathers)


def _column_dgrad(choice, flags):
    """Returns the method that `ub_*` flags select for a column-parallel layer's dgrad.

    The dgrad either reduce-scatters its result or, with "bulk", overlaps the all-gather
    of x.
    """
    scatters, bulk = flags.ub_overlap_rs_dgrad, flags.is_bulk
    if bulk:
        return MethodChoice(Method.BULK)
    if scatters:
        return _flagged(choice, True, gathers=False)
    may_be_bulk = choice.method in (Method.BULK, Method.AUTO)
    if scatters is not None and bulk is not None:
        return MethodChoice(Method.XLA)
    if scatters is not None and (choice.method in FUSED or may_be_bulk):
        return MethodChoice(Method.BULK, is_explicit=False)
    if bulk is not None and may_be_bulk:
        return MethodChoice(_engine_method(gathers=False), is_explicit=False)
    return choice
