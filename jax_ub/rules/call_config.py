"""What a rule knows about its call besides the operands."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ub import arguments, methods, shapes
from jax_ub.errors import shown
from jax_ub.methods import Method
from jax_ub.overlap_config.flags import FlaggedMethod
from jax_ub.overlap_config.method_choice import MethodChoice
from jax_ub.overlap_config.names import DGRAD, FPROP, WGRAD
from jax_ub.overlap_config.tuned import Case, TunedTable
from jax_ub.primitives import mesh, varying
from jax_ub.rules.flags import choices_with_flags
from jax_ub.rules.named import choices_by_pass
from jax_ub.runtime import cuda, overlaps, settings, tuned


@dataclasses.dataclass(frozen=True)
class CallConfig:
    """One call of a public function: hashable, the same on every rank."""

    label: str
    axis_name: tuple[str, ...]  # empty for a local op
    num_ranks: int
    choice: MethodChoice  # how it runs
    is_vma_checked: bool  # whether shard_map types values by the axes they vary over
    dtype: np.dtype | None = None  # of the operands
    out_dtype: np.dtype | None = None  # of the result
    tuned: TunedTable | None = None  # what "auto" takes, where the sizes are known
    dgrad_choice: MethodChoice | None = None  # of its name's; None is as the forward
    wgrad_choice: MethodChoice | None = None  # None is as the dgrad
    dw_dtype: np.dtype | None = None  # of the kernel's gradient; None is `dtype`
    rhs_transposed: bool = False  # kernels lie as [out, in], and so do their gradients
    ub_name: str | None = None  # in the checkpoint names of its residuals
    is_mapped: bool = False  # whether the axis is one of vmap: JAX differentiates
    bias_name: str = "bias"  # what the call's argument is called, in errors
    is_on_cuda: bool = False  # the mesh that it is traced for
    is_named: bool = False  # whether initialize_ub configured its name
    replicated: str = ""  # why other ranks compute the same, where they do

    @property
    def method(self) -> Method:
        """By which method it runs."""
        return self.choice.method

    def with_dtypes(self, dtype, out_dtype) -> "CallConfig":
        """The same call, for operands and a result of these dtypes."""
        return dataclasses.replace(
            self, dtype=np.dtype(dtype), out_dtype=np.dtype(out_dtype)
        )

    def kernel(self, w) -> jax.ShapeDtypeStruct:
        """Of a kernel as its contracts have it, [in, out].

        Raises:
            ShapeContractError: if `w` is no array.
        """
        shapes.check_array(self.label, "w", w)
        shape = w.shape[::-1] if self.rhs_transposed else w.shape
        return jax.ShapeDtypeStruct(shape, w.dtype)

    @property
    def dgrad(self) -> "CallConfig":
        """The same call, as the gradient of its activations runs."""
        return self._as(self.dgrad_choice)

    @property
    def wgrad(self) -> "CallConfig":
        """The same call, as the gradient of its kernel runs on its own."""
        return self._as(self.wgrad_choice or self.dgrad_choice)

    def _as(self, choice):
        return self if choice is None else dataclasses.replace(self, choice=choice)

    def with_dw_dtype(self, dtype) -> "CallConfig":
        """The same call, for a gradient of the kernel of this dtype."""
        return dataclasses.replace(self, dw_dtype=np.dtype(dtype))

    def with_tuned_method(self, op: str, M: int, K: int, N: int) -> "CallConfig":
        """The same call as `op` was the fastest, where that was found out.

        The file's choices are the same on every rank, and so are the global sizes.
        """
        if self.method is not Method.AUTO or self.tuned is None:
            return self
        return self._as(
            self.tuned.find(Case(op, self.num_ranks, M, K, N, str(self.dtype)))
        )

    @property
    def takes_f64(self) -> bool:
        """Whether all passes are plain `jax.lax`: the engine does not multiply f64."""
        return all(choice.method is Method.XLA for choice in self._choices)

    @property
    def may_fall_back(self) -> bool:
        """Whether all passes may become plain `jax.lax`."""
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
        """The same call in plain `jax.lax`, in all passes."""
        return dataclasses.replace(
            self,
            choice=MethodChoice(Method.XLA, is_explicit=False),
            dgrad_choice=None,
            wgrad_choice=None,
            tuned=None,
        )

    def axes(self, *operands) -> frozenset[str]:
        """The mesh axes over which the operands vary, and the own one."""
        own = self.axis_name if self.is_vma_checked else ()
        return varying.axes_of(*jax.tree.leaves(operands)) | frozenset(own)

    def over_ranks(self, method: Method) -> dict[str, Any]:
        """Where a call of a primitive that communicates runs."""
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
        """Whether a gathered operand is laid out in memory: on GPUs it always is."""
        return self.method.materializes_gather or self._is_auto_on_gpus

    @property
    def uses_bulk(self) -> bool:
        """Whether a column layer's backward gathers x beside its dgrad: "bulk".

        On GPUs "auto" does. A wgrad multiplies there what is gathered when all of it
        has come: its own gather would run beside nothing.
        """
        return self.method is Method.BULK or self._is_auto_on_gpus

    @property
    def _is_auto_on_gpus(self):
        is_auto = self.method is Method.AUTO and self.num_ranks > 1
        return is_auto and self.is_on_cuda

    def partial_dtype(self, num_products: int) -> np.dtype:
        """That of partial sums beside a gather, as GEMM+RS has them on GPUs."""
        rounded = num_products == 1 and self.is_on_cuda
        return np.dtype(self.dtype if rounded else np.float32)

    @property
    def fused(self) -> dict[str, Any]:
        """Where a GEMM with its communication runs."""
        return self.over_ranks(self.method.forward)

    @property
    def bulk(self) -> dict[str, Any]:
        """Where communication beside an independent GEMM runs."""
        return self.over_ranks(Method.BULK)

    @property
    def alone(self) -> dict[str, Any]:
        """Where communication without a GEMM runs: by the call's method."""
        return self.over_ranks(self.method)

    @property
    def local(self) -> dict[str, Any]:
        """Where a GEMM without communication runs: every method is one GEMM there.

        Where nobody asked for a method it is as it was tuned on its own, unless it lies
        beside communication that is plain JAX: then all of it was timed.
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
    """Lets a function of (call_config, x, w, **given) fall back where x is f64.

    The reason is recorded. If a pass has a method that was asked for, `product` rejects
    the dtype.
    """

    @functools.wraps(product)
    def run(call_config, x, w, **given):
        is_rejected_or_plain = call_config.takes_f64 or not call_config.may_fall_back
        if is_rejected_or_plain or not (shapes.is_array(x) and shapes.is_f64(x)):
            return product(call_config, x, w, **given)
        with methods.falling_back(call_config.label, "x is float64"):
            return product(call_config.plain, x, w, **given)

    return run


def make_call_config(
    op: str,
    axis_name,
    ub_name: str | None,
    method,
    *,
    like: str | None = None,
    may_be_bulk: bool = False,
) -> CallConfig:
    """Finds the ranks and the methods of a call.

    The call's own method comes first, then what its name is configured with, then
    `JAX_UB_METHOD`.

    Args:
        op: what the call is called in errors.
        axis_name: its mesh axis.
        ub_name: its name in `initialize_ub`, or None.
        method: what the call itself asks for, or None.
        like: the function that communicates as this call does; None is `op`.
        may_be_bulk: whether the call is the backward pass of a column-parallel layer
            only, whose method may be "bulk".

    Raises:
        ShapeContractError: if the axis is not a manual mesh axis. One of `jax.vmap` is
            taken, too, if the method is "xla".
        UnsupportedOverlapError: if the method is "bulk", unless `may_be_bulk`.
    """
    named = method.method if isinstance(method, FlaggedMethod) else method
    label = call_label(op, ub_name)
    is_plain = methods.resolve(label, named, settings.method()) is Method.XLA
    num_ranks = mesh.axis_size(label, axis_name, may_be_mapped=is_plain)
    axes = mesh.axis_tuple(axis_name)
    call_config = plan_call_config(
        op, axes, num_ranks, ub_name, method, like=like, may_be_bulk=may_be_bulk
    )
    if not mesh.are_manual(axes):
        return dataclasses.replace(call_config, is_mapped=True)
    return dataclasses.replace(call_config, is_vma_checked=varying.is_vma_checked(axes))


def make_local_call_config(
    op: str, ub_name: str | None = None, method=None, *, like: str | None = None
) -> CallConfig:
    """The same for a call that does not communicate."""
    return plan_call_config(op, (), 1, ub_name, method, like=like)


def call_label(op: str, ub_name: str | None) -> str:
    """What a call is called in errors and in the record of fallbacks."""
    return op if ub_name is None else f"{op} (ub_name {shown(ub_name)})"


def plan_call_config(
    op: str,
    axes: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None,
    method,
    *,
    like: str | None = None,
    may_be_bulk: bool = False,
) -> CallConfig:
    """The same for known ranks, outside `jax.shard_map` too."""
    label = call_label(op, ub_name)
    if isinstance(method, FlaggedMethod):
        call_config = plan_call_config(
            op, axes, num_ranks, ub_name, method.method, like=like
        )
        return _with_flags(call_config, like or op, ub_name, method)
    arguments.check(op, ub_name=ub_name)
    chosen = methods.resolve(label, method, settings.method())
    if axes and chosen is Method.BULK and not may_be_bulk:
        methods.refuse_bulk(label, "method" if method is not None else "JAX_UB_METHOD")
    found = overlaps.find(label, axes, num_ranks, ub_name)
    automatic = chosen is Method.AUTO or (method is None and bool(found))
    is_on_cuda = cuda.is_traced_for()
    choices = None
    # What was tuned holds for the devices of the default backend.
    if automatic and is_on_cuda == cuda.is_default():
        choices = tuned.on_axis(axes, num_ranks) if axes else tuned.on_no_axis()
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
        replicated=methods.replicated(),
    )
    if method is not None or not found:
        return call_config
    configured = choices_by_pass(like or op, label, found)
    return dataclasses.replace(
        call_config,
        # A pass without a configuration keeps what the call would do without a name.
        choice=configured.get(FPROP, own),
        dgrad_choice=configured.get(DGRAD, own),
        wgrad_choice=configured.get(WGRAD),
    )


def _with_flags(call_config, op, ub_name, method):
    """Applies the flags of a layer; a method that the layer names agrees with them."""
    if methods.resolve(call_config.label, method.method, None) is not Method.AUTO:
        return call_config
    found = overlaps.find(
        call_config.label, call_config.axis_name, call_config.num_ranks, ub_name
    )
    choices = {FPROP: call_config.choice, DGRAD: call_config.dgrad.choice}
    choices = choices_with_flags(op, call_config.label, method.flags, choices, found)
    return dataclasses.replace(
        call_config, choice=choices[FPROP], dgrad_choice=choices[DGRAD]
    )
