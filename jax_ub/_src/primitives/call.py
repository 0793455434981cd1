"""`Call`: a JAX primitive for each FFI target.

A primitive's only parameter is a `Call`: a frozen, hashable description of everything
but the operands, equal on all ranks. In the jaxpr the primitive has no effects, so that
DCE, remat and partial evaluation treat it as an ordinary function. In HLO the CPU's
custom call has a side effect, so that XLA does not merge, move or remove calls that
every rank must run.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_ub._src import lowering_log
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives import lowering, vma
from jax_ub._src.primitives.mesh import (
    check_manual,
    hidden_axis_error,
    refuse_hidden_axes,
)
from jax_ub._src.primitives.scales import Operand
from jax_ub._src.runtime.tuned_file import TunedKey, TunedTable
from jax_ub._src.scaled_array import values_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Settings with which one primitive of a layer runs: ranks, method and label.

    Attributes:
        label: the layer's name in errors, fallbacks and traces.
        choice: method and options.
        axis_name: the mesh axes of the ranks; empty for a local GEMM.
        num_ranks: the number of ranks.
        tuned: replaces `choice` for the sizes that it contains.
        is_of_one_rank: whether this is the local GEMM of a layer over one rank.
        is_named: whether `initialize_ub` configured the layer's name.
        is_mapped: whether `axis_name` is an axis of `jax.vmap`, and JAX differentiates.
        replicated: why several ranks compute the same results, or "".
    """

    label: str
    choice: MethodChoice
    axis_name: tuple[str, ...] = ()
    num_ranks: int = 1
    tuned: TunedTable | None = None
    is_of_one_rank: bool = False
    is_named: bool = False
    is_mapped: bool = False
    replicated: str = ""

    @property
    def on_one_rank(self) -> "Execution":
        """Returns a copy of these settings for a mesh axis with only one rank.

        Such a call runs its GEMMs and communicates nothing.
        """
        return Execution(
            label=self.label,
            choice=self.choice.for_local_gemm,
            tuned=self.tuned,
            is_of_one_rank=True,
            replicated=self.replicated,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Base class of ops. An op with its options is the parameter of a JAX primitive.

    A subclass sets `op`, adds the op's options as fields, and defines the shapes of the
    results and their reference implementation in plain `jax.lax`.
    """

    # The op's name, such as "matmul". The FFI target and the primitive are named
    # "jax_ub$matmul".
    op: ClassVar[str]
    primitive: ClassVar[Primitive]
    # Whether the collective of the call is an all-gather. Other collectives sum over
    # the ranks.
    gathers: ClassVar[bool] = False
    # Whether the call is a collective without a GEMM.
    communicates_only: ClassVar[bool] = False
    # Whether the call only prepares another call, as when ranks agree on an FP8 scale.
    # Such a call overlaps with no GEMM, so `ub.fallbacks` does not report it if XLA
    # computes it.
    is_auxiliary: ClassVar[bool] = False
    # Whether all ranks get equal results, as from an all-reduce.
    replicates: ClassVar[bool] = False
    # Whether the GEMMs contract rows (tokens), as in the gradient of a kernel. Such a
    # call also sums over the batch axes of its activations, so `jax.vmap` runs it in a
    # loop. The results of other calls keep the batch axes, and `jax.vmap` adds one.
    contracts_rows: ClassVar[bool] = False
    # Names of the fields that become FFI attributes. Only the custom call of this op
    # has these attributes.
    option_names: ClassVar[tuple[str, ...]] = ()

    execution: Execution
    # Number of FP8 scale arrays: one for each GEMM operand if any of them is FP8, and
    # otherwise 0. The scales are the last operands of the primitive, in the order of
    # the GEMM operands. `__call__` sets this field. Of the methods of this class, only
    # `split` and `plain` take the scales as operands.
    num_scales: int = 0
    # Whether each row, column or block has a separate scale. Otherwise each tensor has
    # one scale, an array of shape [1]. All ranks that share the tensor have the same
    # scale.
    has_row_scales: bool = False

    def __init_subclass__(cls):
        if "op" in vars(cls):
            cls.primitive = _make_primitive(f"jax_ub${cls.op}")

    @property
    def label(self) -> str:
        return self.execution.label

    @property
    def axis_name(self) -> tuple[str, ...]:
        return self.execution.axis_name

    @property
    def num_ranks(self) -> int:
        return self.execution.num_ranks

    @property
    def choice(self) -> MethodChoice:
        return self.execution.choice

    @property
    def method(self) -> Method:
        return self.execution.choice.method

    @property
    def has_scales(self) -> bool:
        return self.num_scales > 0

    @property
    def kernels(self) -> range:
        """Returns the indices of the operands that are kernels of a layer.

        The call has an option `rhs_transposed` for their layout. Empty for other calls.
        """
        return range(0)

    def split(self, operands: Sequence) -> tuple[Sequence, Sequence]:
        """Splits the primitive's operands into the op's operands and their scales."""
        size = len(operands) - self.num_scales
        return operands[:size], operands[size:]

    def shapes(self, *operands) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Returns (shape, dtype) of each result, given the operands' avals.

        The gathered scales of `AllGatherMatmul` are left out.
        """
        raise NotImplementedError

    def scales(self, operands: Sequence[Operand]) -> tuple[jax.Array, ...]:
        """Returns the FP8 scales of the GEMM operands, or () if none of them is FP8."""
        return ()

    def gathered_scales(self, scales: Sequence) -> Sequence:
        """Returns the FP8 scales that are all-gathered together with the FP8 values.

        Empty if the call does not return a gathered FP8 array with several scales.
        """
        return ()

    def reference(
        self, *operands: jax.Array, scales: Sequence[jax.Array] = ()
    ) -> Sequence[jax.Array]:
        """Computes the results in plain `jax.lax`, for fallbacks and for tests."""
        raise NotImplementedError

    def plain(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """Computes the call in plain `jax.lax`. The last operands are FP8 scales."""
        others, scales = self.split(operands)
        return self.reference(*others, scales=scales)

    def on_one_rank(self, *operands: Operand) -> Sequence[jax.Array]:
        """Computes the results on a single rank, without communication."""
        raise NotImplementedError

    def options(self) -> dict[str, int | float]:
        """Returns the FFI attributes that only this target has, such as `num_pairs`.

        Integers and bools become i64 attributes, floats become f32.
        """
        names = self.option_names
        if not self.communicates_only:
            names += ("has_scales", "has_row_scales")
        return {name: getattr(self, name) for name in names}

    def aliases(self, operands) -> dict[int, int]:
        """Returns which results overwrite operands: {operand index: result index}."""
        return {}

    def communicated(self, *operands) -> tuple[int, ...]:
        """Returns the shape of the array that the ranks exchange, `[..., rows, K]`.

        It is the array after an all-gather, or before a reduce-scatter or all-reduce.
        """
        raise NotImplementedError

    def gathered_dtype(self, *operands) -> np.dtype | None:
        """Returns the dtype of the all-gathered array, or None if none is gathered."""
        return operands[0].dtype if self.gathers else None

    def gathered_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an all-gathered array: [..., m, K] -> [..., P*m, K]."""
        *batch, rows, width = shape
        return (*batch, rows * self.num_ranks, width)

    def scattered_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a scattered array: [..., P*m, K] -> [..., m, K]."""
        *batch, rows, width = shape
        return (*batch, rows // self.num_ranks, width)

    def is_activation(self, index: int) -> bool:
        """Returns whether operand `index` is an activation `[..., rows, features]`.

        Such an operand takes any number of leading batch axes.
        """
        return index == 0

    def is_replicated(self, index: int) -> bool:
        """Returns whether operand `index` must be equal on all ranks."""
        return False

    def global_sizes(self, operands: Sequence) -> tuple[str, int, int, int]:
        """Returns the name of the op, and the sizes M, K and N of its global GEMM.

        A collective without a GEMM counts its own features as N.
        """
        rows, width = rows_and_features(self.communicated(*operands))
        return self.op, rows, width, self.num_ranks * width

    def tuned_op(self, operands: Sequence) -> str | None:
        """Returns the op's name in files of the `tune` command. None if not tuned."""
        return self.op

    def tuned_key(self, operands: Sequence) -> TunedKey | None:
        """Returns the call's key in files of the `tune` command. None if not tuned."""
        op = self.tuned_op(operands)
        if op is None:
            return None
        _, M, K, N = self.global_sizes(operands)
        return TunedKey(op, self.num_ranks, M, K, N, str(operands[0].dtype))

    def __call__(self, *operands: Operand) -> tuple[jax.Array, ...]:
        """Binds the primitive of the op, or computes plain JAX if the method is "xla".

        With one rank, only the GEMMs run, because there is nothing to communicate.

        All operands are cast to vary over the union of their varying mesh axes, except
        that replicated operands do not vary over `axis_name`.
        """
        scales = self.scales(operands)
        axes = vma.axes_of(*map(values_of, operands), *scales)
        shared = axes - frozenset(self.axis_name)
        operands = tuple(
            vma.pcast_varying(x, shared if self.is_replicated(i) else axes)
            for i, x in enumerate(operands)
        )
        has_row_scales = any(scale.ndim > 1 for scale in scales)
        scaled = dataclasses.replace(
            self, num_scales=len(scales), has_row_scales=has_row_scales
        )
        if self.axis_name and self.num_ranks == 1 and self.method is not Method.XLA:
            results = scaled.on_one_rank(*operands)
            if self.replicates:
                results = [vma.pcast_replicated(y, self.axis_name) for y in results]
            return tuple(results)
        scales = vma.pcast_varying(scales, axes)
        arrays = tuple(map(values_of, operands))
        call = scaled._tuned(arrays)
        # Method "xla" computes plain JAX without the primitive. The exception is a
        # tuned file that chooses JAX's Pallas kernel. Then "xla" is only the fallback,
        # and the lowering rule of the primitive decides whether the kernel can run.
        if call.method is Method.XLA and call.choice.pallas is None:
            if self.axis_name and not self.execution.is_mapped:
                arrays = tuple(
                    refuse_hidden_axes(self.label, self.axis_name, x) for x in arrays
                )
            with call.named_as_plain(is_tuned=call is not scaled):
                return tuple(call.reference(*arrays, scales=scales))
        return tuple(call.primitive.bind(*arrays, *scales, call=call))

    def named_as_plain(self, *, is_tuned: bool) -> AbstractContextManager[Any]:
        """Adds a name scope that states why the call runs as plain `jax.lax`.

        If the whole layer fell back to plain JAX, the layer has already added such a
        scope.
        """
        is_chosen = is_tuned or self.choice.is_explicit
        if not (is_chosen and self.axis_name and self.num_ranks > 1):
            return contextlib.nullcontext()
        source = "from JAX_UB_METHOD" if self.choice.is_from_environment else "given"
        source = "the fastest by a tuned table" if is_tuned else source
        reason = f'method = "xla" ({source})'
        return lowering_log.plain_by_choice(self.label, reason)

    def _tuned(self, operands):
        """Replaces "auto" by the fastest method in the tuned file for these sizes."""
        tuned = self.execution.tuned
        if tuned is None:
            return self
        key = self.tuned_key(operands)
        found = None if key is None else tuned.find(key)
        execution = dataclasses.replace(
            self.execution, choice=found or self.choice, tuned=None
        )
        return dataclasses.replace(self, execution=execution)


def rows_and_features(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the sizes of an array [..., features] as a matrix: rows and features."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def num_features(arrays: Sequence) -> int:
    """Returns the total number of features of arrays `[..., features]`."""
    return sum(array.shape[-1] for array in arrays)


def overwritten(operands: Sequence, first: int, dtype: np.dtype) -> dict[int, int]:
    """Maps each operand from index `first` on to the result that overwrites it.

    `dtype` is the dtype of the results. Operands of another dtype are not overwritten.
    """
    return {first + i: i for i, x in enumerate(operands[first:]) if x.dtype == dtype}


def _make_primitive(target):
    primitive = Primitive(target)
    primitive.multiple_results = True
    # xla.apply_primitive compiles a call outside of jax.jit, even under
    # `jax.disable_jit`. A jitted function that binds the primitive cannot be used: if
    # its result contains a NaN, JAX calls it again op by op under `jax_debug_nans`,
    # which would recurse.
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(_abstract_eval)
    batching.fancy_primitive_batchers[primitive] = _batch
    ad.primitive_jvps[primitive] = _refuse_jvp
    # Caching is disabled, so that JAX lowers each call site separately. Otherwise the
    # lowering log would lack calls.
    mlir.register_lowering(primitive, lowering.lower, cacheable=False)
    return primitive


def _abstract_eval(*operands, call):
    check_manual(call.label, operands)
    axes = vma.axes_of(*operands)
    operands, scales = call.split(operands)
    lowering.check_capacity(call, operands)
    if call.replicates:
        axes -= frozenset(call.axis_name)
    shapes = call.shapes(*operands)
    shapes += [
        (call.gathered_shape(s.shape), s.dtype) for s in call.gathered_scales(scales)
    ]
    return [vma.result_aval(shape, dtype, axes, operands[0]) for shape, dtype in shapes]


def _batch(axis_data, operands, dims, *, call):
    if axis_data.name in call.axis_name:
        raise hidden_axis_error(call.label, axis_data.name)
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    bind = functools.partial(call.primitive.bind, call=call)
    if not mapped:
        results = bind(*operands)
        return results, [None] * len(results)
    num_operands = len(call.split(operands)[0])

    def is_activation(index):
        if index < num_operands:
            return call.is_activation(index)
        # Scales per row have the same batch axes as the operand that they scale.
        return call.has_row_scales and call.is_activation(index - num_operands)

    if not call.contracts_rows and all(map(is_activation, mapped)):
        size = operands[mapped[0]].shape[dims[mapped[0]]]
        results = bind(
            *(
                batching.bdim_at_front(x, dim, size) if is_activation(i) else x
                for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
            )
        )
    else:
        slices = {i: jnp.moveaxis(operands[i], dims[i], 0) for i in mapped}
        results = lax.map(
            lambda each: bind(*(each.get(i, x) for i, x in enumerate(operands))),
            slices,
        )
    return results, [0] * len(results)


def _refuse_jvp(operands, tangents, *, call):
    raise UnsupportedOverlapError(
        f"{call.label}: forward-mode differentiation and second derivatives are not "
        "supported. Differentiate once, with jax.grad or jax.vjp. If you call a "
        "functional_forward or functional_backward of jax_ub.ops.fused, which have no "
        "derivatives, do so in the rules of a custom_vjp."
    )
