"""`CallConfig`: method, mesh axis and dtypes of one call, fixed when it is traced."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ub._src import arguments, lowering_log, methods
from jax_ub._src import checks as shapes
from jax_ub._src.config.flags import FlaggedMethod
from jax_ub._src.config.tuned_file import TunedKey, TunedTable
from jax_ub._src.errors import shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.parallel import DGRAD, FPROP, WGRAD, ParallelMode
from jax_ub._src.primitives import mesh, varying
from jax_ub._src.rules.flags import choices_with_flags
from jax_ub._src.rules.named import choices_by_pass
from jax_ub._src.runtime import cuda_engine, registry, settings, tuned_tables


@dataclasses.dataclass(frozen=True)
class CallConfig:
    """Trace-time settings of one op call: ranks, dtypes, and the method of each pass.

    It is hashable, so that it can be a static argument of `jax.jit`, and equal on all
    ranks.
    """

    label: str
    axis_name: tuple[str, ...]  # empty for a local op
    num_ranks: int
    choice: MethodChoice  # method and settings of the forward pass
    is_vma_checked: bool  # whether the surrounding shard_map has check_vma=True
    dtype: np.dtype | None = None  # dtype of the operands
    out_dtype: np.dtype | None = None  # dtype of the result
    tuned: TunedTable | None = None  # tuned choices by global sizes, for method "auto"
    # Method of the dgrad, as configured for `ub_name`; None uses `choice`.
    dgrad_choice: MethodChoice | None = None
    wgrad_choice: MethodChoice | None = None  # None uses the dgrad's method
    dw_dtype: np.dtype | None = None  # dtype of the kernel's gradient; None is `dtype`
    rhs_transposed: bool = False  # whether kernels and their gradients are [out, in]
    ub_name: str | None = None  # part of the checkpoint names of the residuals
    # Whether `axis_name` is an axis of jax.vmap: then JAX itself differentiates the
    # call.
    is_mapped: bool = False
    bias_name: str = "bias"  # name of the caller's bias argument, for errors
    is_on_cuda: bool = False  # whether the call is traced for CUDA devices
    is_named: bool = False  # whether initialize_ub configured `ub_name`
    replicated: str = ""  # why several ranks compute the same results, or empty

    @property
    def method(self) -> Method:
        """Returns the method of the forward pass, such as `Method.PIPELINE`."""
        return self.choice.method

    def with_dtypes(self, dtype, out_dtype) -> "CallConfig":
        """Returns a copy with the given dtypes of the operands and of the result."""
        return dataclasses.replace(
            self, dtype=np.dtype(dtype), out_dtype=np.dtype(out_dtype)
        )

    def kernel(self, w) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype that the kernel `w` has in [in, out] layout.

        Raises:
            ShapeContractError: if `w` is not an array.
        """
        shapes.check_array(self.label, "w", w)
        shape = w.shape[::-1] if self.rhs_transposed else w.shape
        return jax.ShapeDtypeStruct(shape, w.dtype)

    @property
    def dgrad(self) -> "CallConfig":
        """Returns the settings of the dgrad, the GEMM that computes x's gradient."""
        return self._as(self.dgrad_choice)

    @property
    def wgrad(self) -> "CallConfig":
        """Returns the settings of a wgrad that runs separately from the dgrad."""
        return self._as(self.wgrad_choice or self.dgrad_choice)

    def _as(self, choice):
        return self if choice is None else dataclasses.replace(self, choice=choice)

    def with_dw_dtype(self, dtype) -> "CallConfig":
        """Returns a copy whose wgrad returns the kernel's gradient in `dtype`."""
        return dataclasses.replace(self, dw_dtype=np.dtype(dtype))

    def with_tuned_method(self, op: str, M: int, K: int, N: int) -> "CallConfig":
        """Returns a copy with the method measured fastest for `op` and these sizes.

        Only method "auto" is tuned. All ranks read the same table and look up the same
        global sizes, so they make the same choice.

        Args:
            op: the key of the op in the tuned table.
            M: number of tokens on all ranks.
            K: global size of the contracted dimension.
            N: global size of the output dimension.
        """
        if self.method is not Method.AUTO or self.tuned is None:
            return self
        return self._as(
            self.tuned.find(TunedKey(op, self.num_ranks, M, K, N, str(self.dtype)))
        )

    @property
    def takes_f64(self) -> bool:
        """Whether the call accepts f64: only if plain `jax.lax` runs all passes.

        The engine has no f64 GEMM.
        """
        return all(choice.method is Method.XLA for choice in self._choices)

    @property
    def may_fall_back(self) -> bool:
        """Whether plain `jax.lax` may replace the engine in every pass of the call."""
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
        """Returns a copy that computes all passes in `jax.lax`, not in the engine."""
        return dataclasses.replace(
            self,
            choice=MethodChoice(Method.XLA, is_explicit=False),
            dgrad_choice=None,
            wgrad_choice=None,
            tuned=None,
        )

    def axes(self, *operands) -> frozenset[str]:
        """Returns the mesh axes over which the operands vary, plus `axis_name`.

        `axis_name` is left out with `check_vma=False`, where values have no vma type.
        """
        own = self.axis_name if self.is_vma_checked else ()
        return varying.axes_of(*jax.tree.leaves(operands)) | frozenset(own)

    def over_ranks(self, method: Method) -> dict[str, Any]:
        """Returns keyword arguments for a primitive that communicates over the ranks.

        They are fields of `Call`. `method` replaces the method of the forward
        pass.
        """
        return {
            "axis_name": self.axis_name,
            "num_ranks": self.num_ranks,
            "choice": self.choice.with_method(method),
            "tuned": self.tuned if method is Method.AUTO else None,
            "label": self.label,
            "is_named": self.is_named,
            "replicated": self.replicated,
        }

    @property
    def materializes_gather(self) -> bool:
        """Whether the all-gather of x stores all rows, so the wgrad can reuse them."""
        return self.method.materializes_gather or self._is_auto_on_gpus

    @property
    def uses_bulk(self) -> bool:
        """Whether the backward pass of a column layer gathers x during its dgrad.

        On GPUs "auto" does so, too: there a wgrad starts only after all gathered rows
        have arrived, so a gather within the wgrad would overlap with nothing.
        """
        return self.method is Method.BULK or self._is_auto_on_gpus

    @property
    def _is_auto_on_gpus(self):
        is_auto = self.method is Method.AUTO and self.num_ranks > 1
        return is_auto and self.is_on_cuda

    def partial_dtype(self, num_products: int) -> np.dtype:
        """Returns the dtype of a bulk dgrad's partial sums, before the reduce-scatter.

        One product on GPUs has the operands' dtype, as in GEMM+RS there. Otherwise the
        partial sums are f32.
        """
        rounded = num_products == 1 and self.is_on_cuda
        return np.dtype(self.dtype if rounded else np.float32)

    @property
    def fused(self) -> dict[str, Any]:
        """Returns keyword arguments for a primitive that overlaps a GEMM by parts.

        They are fields of `Call`. The GEMM depends on the communication, so
        chunks are sent while other chunks are multiplied.
        """
        return self.over_ranks(self.method.forward)

    @property
    def bulk(self) -> dict[str, Any]:
        """Returns keyword arguments for a collective that overlaps an independent GEMM.

        They are fields of `Call`.
        """
        return self.over_ranks(Method.BULK)

    @property
    def alone(self) -> dict[str, Any]:
        """Returns keyword arguments for a collective that runs without a GEMM.

        They are fields of `Call`.
        """
        return self.over_ranks(self.method)

    @property
    def local(self) -> dict[str, Any]:
        """Returns keyword arguments for a GEMM that does not communicate.

        All methods of the engine run such a GEMM alike. Without an explicit method the
        GEMM is tuned separately, except if the method is "xla": then it was timed
        together with the plain JAX communication around it.
        """
        is_tuned = self.choice.may_fall_back and self.method is not Method.XLA
        overlaps_nothing = self.method in (Method.AUTO, Method.XLA)
        method = self.method if overlaps_nothing else Method.DIRECT
        return {
            "choice": MethodChoice(method, is_explicit=self.choice.is_explicit),
            "tuned": self.tuned if is_tuned else None,
            "label": self.label,
            "is_of_one_rank": bool(self.axis_name) and self.num_ranks == 1,
            "replicated": self.replicated,
        }


def plain_for_f64(product: Callable) -> Callable:
    """Decorates an op so that it computes f64 arrays by `jax.lax`, not the engine.

    The fallback is recorded. If a pass has an explicit method, there is no fallback,
    and `product` rejects the dtype.
    """

    @functools.wraps(product)
    def run(call_config, x, w, **given):
        is_rejected_or_plain = call_config.takes_f64 or not call_config.may_fall_back
        if is_rejected_or_plain or not (shapes.is_array(x) and shapes.is_f64(x)):
            return product(call_config, x, w, **given)
        with lowering_log.falling_back(call_config.label, "x is float64"):
            return product(call_config.plain, x, w, **given)

    return run


def make_call_config(
    op: str,
    axis_name,
    ub_name: str | None,
    method,
    *,
    mode: ParallelMode | None = None,
    may_be_bulk: bool = False,
) -> CallConfig:
    """Chooses method, ranks and settings of an op call inside `jax.shard_map`.

    The method is the argument `method`, else the configuration of `ub_name`, else
    `JAX_UB_METHOD`.

    Args:
        op: the call's name in errors.
        axis_name: the mesh axis of the ranks.
        ub_name: the call's name in `initialize_ub`, or None.
        method: the method that the caller passed, or None.
        mode: the call's row in the table of parallel modes; None for a collective,
            which cannot be named.
        may_be_bulk: whether the method may be "bulk". Set for a call that is only the
            backward pass of a column-parallel layer.

    Raises:
        ShapeContractError: if the axis is not a manual mesh axis. With method "xla" an
            axis of `jax.vmap` is accepted, too.
        UnsupportedOverlapError: if the method is "bulk", unless `may_be_bulk`.
    """
    named = method.method if isinstance(method, FlaggedMethod) else method
    label = call_label(op, ub_name)
    is_plain = methods.resolve(label, named, settings.method()) is Method.XLA
    num_ranks = mesh.axis_size(label, axis_name, may_be_mapped=is_plain)
    axes = mesh.axis_tuple(axis_name)
    call_config = plan_call_config(
        op, axes, num_ranks, ub_name, method, mode=mode, may_be_bulk=may_be_bulk
    )
    if not mesh.are_manual(axes):
        return dataclasses.replace(call_config, is_mapped=True)
    return dataclasses.replace(call_config, is_vma_checked=varying.is_vma_checked(axes))


def make_local_call_config(
    op: str,
    ub_name: str | None = None,
    method=None,
    *,
    mode: ParallelMode | None = None,
) -> CallConfig:
    """Chooses the method and settings of a GEMM that does not communicate."""
    return plan_call_config(op, (), 1, ub_name, method, mode=mode)


def call_label(op: str, ub_name: str | None) -> str:
    """Returns an op's name, with its `ub_name` if it has one, for error messages."""
    return op if ub_name is None else f"{op} (ub_name {shown(ub_name)})"


def plan_call_config(
    op: str,
    axes: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None,
    method,
    *,
    mode: ParallelMode | None = None,
    may_be_bulk: bool = False,
) -> CallConfig:
    """Chooses the method of an op call over the `num_ranks` ranks of mesh axes `axes`.

    Unlike `make_call_config` it does not need a surrounding `jax.shard_map`.
    """
    label = call_label(op, ub_name)
    if isinstance(method, FlaggedMethod):
        call_config = plan_call_config(
            op, axes, num_ranks, ub_name, method.method, mode=mode
        )
        return _with_flags(call_config, mode, ub_name, method)
    arguments.check(op, ub_name=ub_name)
    chosen = methods.resolve(label, method, settings.method())
    if axes and chosen is Method.BULK and not may_be_bulk:
        methods.refuse_bulk(label, "method" if method is not None else "JAX_UB_METHOD")
    found = registry.find(label, axes, num_ranks, ub_name)
    automatic = chosen is Method.AUTO or (method is None and bool(found))
    is_on_cuda = cuda_engine.is_traced_for()
    choices = None
    # Tuned tables are measured on devices of the default backend.
    if automatic and is_on_cuda == cuda_engine.is_default():
        choices = (
            tuned_tables.on_axis(axes, num_ranks) if axes else tuned_tables.on_no_axis()
        )
    own = MethodChoice(chosen)
    call_config = CallConfig(
        label,
        axes,
        num_ranks,
        own,
        is_vma_checked=False,
        tuned=choices,
        is_on_cuda=is_on_cuda,
        ub_name=ub_name,
        is_named=bool(found),
        replicated=lowering_log.replicated(),
    )
    if method is not None or not found or mode is None:
        return call_config
    configured = choices_by_pass(mode, label, found)
    return dataclasses.replace(
        call_config,
        # A pass without a configuration runs as it would without a name.
        choice=configured.get(FPROP, own),
        dgrad_choice=configured.get(DGRAD, own),
        wgrad_choice=configured.get(WGRAD),
    )


def _with_flags(call_config, mode, ub_name, method):
    """Replaces the methods of a layer's passes according to its `ub_*` flags.

    They change nothing if the layer has an explicit method: `OverlapFlags.check` has
    verified that the two agree.
    """
    if methods.resolve(call_config.label, method.method, None) is not Method.AUTO:
        return call_config
    found = registry.find(
        call_config.label, call_config.axis_name, call_config.num_ranks, ub_name
    )
    choices = {FPROP: call_config.choice, DGRAD: call_config.dgrad.choice}
    choices = choices_with_flags(mode, call_config.label, method.flags, choices, found)
    return dataclasses.replace(
        call_config, choice=choices[FPROP], dgrad_choice=choices[DGRAD]
    )
