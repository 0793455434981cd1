"""What a rule knows about its call besides the operands."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_ub import methods, shapes
from jax_ub.errors import UnknownNameError
from jax_ub.methods import Method
from jax_ub.overlap_config.names import DGRAD, FPROP, WGRAD
from jax_ub.overlap_config.tuned import Case, Choices
from jax_ub.overlap_config.tuning import Tuning
from jax_ub.primitives import mesh, varying
from jax_ub.rules.named import Way, ways_of
from jax_ub.runtime import cuda, overlaps, settings, tuned


@dataclasses.dataclass(frozen=True)
class Site:
    """One call of a public function: hashable, the same on every rank."""

    label: str
    axis_name: tuple[str, ...]  # empty for a local op
    num_ranks: int
    method: Method
    is_tracked: bool  # whether shard_map types values by the axes they vary over
    dtype: np.dtype | None = None  # of the operands
    out_dtype: np.dtype | None = None  # of the result
    num_splits: int = 0  # pieces of a shard in the pipeline; 0 is the engine's choice
    tuning: Tuning = Tuning()  # the schedule's variant, and how it runs on a GPU
    choices: Choices | None = None  # of tuned methods, for "auto"
    is_chosen: bool = False  # the method is one of those: nobody asked for it
    is_default: bool = False  # it is that of the name, which nobody has configured
    dgrad_way: Way | None = None  # as its name is configured; None is as the forward
    wgrad_way: Way | None = None  # None is as the dgrad
    dw_dtype: np.dtype | None = None  # of the kernel's gradient; None is `dtype`
    rhs_transposed: bool = False  # kernels lie as [out, in], and so do their gradients
    bias_name: str = "bias"  # what the call's argument is called, in errors

    def with_dtypes(self, dtype, out_dtype) -> "Site":
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
    def dgrad(self) -> "Site":
        """The same call, as the gradient of its activations runs."""
        return self._as(self.dgrad_way)

    @property
    def wgrad(self) -> "Site":
        """The same call, as the gradient of its kernel runs on its own."""
        return self._as(self.wgrad_way or self.dgrad_way)

    def _as(self, way):
        if way is None:
            return self
        return dataclasses.replace(
            self,
            method=way.method,
            num_splits=way.num_splits,
            tuning=way.tuning,
            is_default=way.is_default,
        )

    def with_dw_dtype(self, dtype) -> "Site":
        """The same call, for a gradient of the kernel of this dtype."""
        return dataclasses.replace(self, dw_dtype=np.dtype(dtype))

    def as_tuned(self, op: str, M: int, K: int, N: int) -> "Site":
        """The same call as `op` was the fastest, where that was found out.

        The file's choices are the same on every rank, and so are the global sizes.
        """
        if self.method is not Method.AUTO or self.choices is None:
            return self
        case = Case(op, self.num_ranks, M, K, N, str(self.dtype))
        choice = self.choices.by_case.get(case)
        if choice is None:
            return self
        return dataclasses.replace(choice.apply(self), is_chosen=True)

    def axes(self, *operands) -> frozenset[str]:
        """The mesh axes over which the operands vary, and the own one."""
        own = self.axis_name if self.is_tracked else ()
        return varying.axes_of(*jax.tree.leaves(operands)) | frozenset(own)

    def over_ranks(self, method: Method) -> dict[str, Any]:
        """Where a call of a primitive that communicates runs."""
        return {
            "axis_name": self.axis_name,
            "num_ranks": self.num_ranks,
            "method": method,
            "num_splits": self.num_splits if method is Method.PIPELINE else 0,
            "tuning": self.tuning,
            "choices": self.choices if method is Method.AUTO else None,
            "is_chosen": self.is_chosen or self.is_default,
            "label": self.label,
        }

    @property
    def copies_operands(self) -> bool:
        """Whether a gathered operand is laid out in memory: on GPUs it always is."""
        return self.method.copies_operands or self._is_auto_on_gpus

    @property
    def communicates_beside(self) -> bool:
        """Whether a column layer's backward gathers x beside its dgrad: "bulk".

        On GPUs "auto" does. A wgrad multiplies there what is gathered when all of it
        has come: its own gather would run beside nothing.
        """
        return self.method is Method.BULK or self._is_auto_on_gpus

    @property
    def _is_auto_on_gpus(self):
        return self.method is Method.AUTO and cuda.is_default()

    def partial_dtype(self, num_products: int) -> np.dtype:
        """That of partial sums beside a gather, as GEMM+RS has them on GPUs."""
        rounded = num_products == 1 and cuda.is_default()
        return np.dtype(self.dtype if rounded else np.float32)

    @property
    def fused(self) -> dict[str, Any]:
        """Where a GEMM with its communication runs."""
        return self.over_ranks(self.method.forward)

    @property
    def bulk(self) -> dict[str, Any]:
        """Where communication beside an independent GEMM runs."""
        where = self.over_ranks(Method.BULK)
        return where | {"is_chosen": where["is_chosen"] or self.method is Method.AUTO}

    @property
    def alone(self) -> dict[str, Any]:
        """Where communication without a GEMM runs."""
        return self.over_ranks(self.method.alone)

    @property
    def local(self) -> dict[str, Any]:
        """Where a GEMM without communication runs.

        Beside communication that was tuned it has a choice of its own, unless that is
        plain JAX: all of it was timed.
        """
        chosen = self.is_chosen and self.method is not Method.XLA
        return {
            "method": self.method.alone,
            "choices": self.choices if chosen or self.method is Method.AUTO else None,
            "is_chosen": self.is_chosen,
            "label": self.label,
        }


def open_site(
    op: str, axis_name, ub_name: str | None, method, *, like: str | None = None
) -> Site:
    """Finds the ranks and the methods of a call.

    The call's own method comes first, then what its name is configured with, then
    `JAX_UB_METHOD`.

    Args:
        op: what the call is called in errors.
        axis_name: its mesh axis.
        ub_name: its name in `initialize_ub`, or None.
        method: what the call itself asks for, or None.
        like: the function that communicates as this call does; None is `op`.

    Raises:
        ShapeContractError: if the axis is not a manual mesh axis.
    """
    num_ranks = mesh.axis_size(label_of(op, ub_name), axis_name)
    axes = mesh.axis_tuple(axis_name)
    site = plan_site(op, axes, num_ranks, ub_name, method, like=like)
    return dataclasses.replace(site, is_tracked=varying.is_tracked(axes))


def open_local_site(
    op: str, ub_name: str | None = None, method=None, *, like: str | None = None
) -> Site:
    """The same for a call that does not communicate."""
    return plan_site(op, (), 1, ub_name, method, like=like)


def label_of(op: str, ub_name: str | None) -> str:
    """What a call is called in errors and in the record of fallbacks."""
    return op if ub_name is None else f"{op} (ub_name {ub_name!r})"


def plan_site(
    op: str,
    axes: tuple[str, ...],
    num_ranks: int,
    ub_name: str | None,
    method,
    *,
    like: str | None = None,
) -> Site:
    """The same for known ranks, outside `jax.shard_map` too."""
    label = label_of(op, ub_name)
    if ub_name is not None and not isinstance(ub_name, str):
        raise UnknownNameError(
            f"{op}: ub_name = {ub_name!r} is of type {type(ub_name).__name__}. Pass "
            'the name of a layer, such as "qkv", or leave ub_name out.'
        )
    chosen = methods.resolve(label, method, settings.method())
    found = overlaps.find(label, axes, num_ranks, ub_name)
    automatic = chosen is Method.AUTO or (method is None and bool(found))
    choices = None
    if automatic:
        choices = tuned.on_axis(axes, num_ranks) if axes else tuned.on_no_axis()
    site = Site(label, axes, num_ranks, chosen, is_tracked=False, choices=choices)
    if method is not None or not found:
        return site
    ways = ways_of(like or op, label, found)
    forward = ways.get(FPROP, Way(chosen))
    return dataclasses.replace(
        site,
        method=forward.method,
        num_splits=forward.num_splits,
        tuning=forward.tuning,
        is_default=forward.is_default,
        # A pass without a configuration keeps what the call would do without a name.
        dgrad_way=ways.get(DGRAD, Way(chosen)),
        wgrad_way=ways.get(WGRAD),
    )
