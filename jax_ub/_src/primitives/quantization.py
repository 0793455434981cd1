"""The primitives that quantize to FP8: amaxes (largest absolute values) and casts.

On CPUs the engine runs them, several times as fast as XLA, which divides even small
casts among all threads of its pool. XLA computes the same results, from the formulas of
`scaled_array`, on GPUs, with method "xla", in exported programs, and where it divides
arrays among devices.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from jax_ub._src import scaled_array
from jax_ub._src.checks import has_symbolic_sizes
from jax_ub._src.methods import Method
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.primitives.call import Execution
from jax_ub._src.runtime import cpu_engine
from jax_ub._src.scaled_array import MXFP8_BLOCK


def amax_of(
    execution: Execution, x: jax.Array, axes: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns the largest |x| over `axes`, in f32. The reduced axes keep size 1.

    It is infinite if there is a NaN. It has no gradient.
    """
    x = lax.stop_gradient(x)
    axes = tuple(range(x.ndim)) if axes is None else axes
    axes = tuple(axis % x.ndim for axis in axes)
    return _amax(execution.choice.method, x, axes=axes, block_axis=None)


def amax_of_blocks(execution: Execution, x: jax.Array, axis: int) -> jax.Array:
    """Returns the largest |x| of each MXFP8 block of 32 values along `axis`, in f32.

    It is NaN if there is a NaN. It has no gradient.
    """
    x = lax.stop_gradient(x)
    return _amax(execution.choice.method, x, axes=(), block_axis=axis % x.ndim)


def cast(execution: Execution, x: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """Returns x / scales, computed in f32, clipped and rounded once to an FP8 dtype.

    A NaN stays a NaN, and an infinity becomes the largest number. `scales` is a scalar,
    or has as many dimensions as x. The result has no gradient.
    """
    x, scales = lax.stop_gradient((x, scales))
    scales = scales.reshape(scales.shape or (1,) * x.ndim)
    return _cast(execution.choice.method, x, scales, dtype=np.dtype(dtype))


def _amax(method, x, *, axes, block_axis):
    compute = _plain_amax if _is_plain(method, x) else _amax_p.bind
    return compute(x, axes=axes, block_axis=block_axis)


def _cast(method, *operands, dtype):
    if _is_plain(method, *operands):
        return scaled_array.cast(*operands, dtype)
    operands = vma.pcast_varying(operands, vma.axes_of(*operands))
    return _cast_p.bind(*operands, dtype=dtype)


def _plain_amax(x, *, axes, block_axis):
    if block_axis is None:
        return scaled_array.amax_of(x, axes)
    return scaled_array.amax_of_blocks(x, block_axis)


def _is_plain(method, *arrays):
    return method is Method.XLA or vma.is_sharded(arrays)


@dataclasses.dataclass(frozen=True)
class _ScaleLayout:
    """How elements of an array share scales: the attributes of the custom calls.

    The engine reads the array as `[groups, rows, columns]`. There is one scale for each
    column of a group if `per_column`, otherwise one for each group.
    """

    groups: int
    rows: int
    columns: int
    per_column: bool


def _layout(shape: Sequence[int], scales: Sequence[int]) -> _ScaleLayout | None:
    """Returns how an array shares scales, or None if a `_ScaleLayout` cannot say it.

    A dimension in which array and scales have the same size has a scale for each index.
    The engine supports such dimensions before and after those that share scales.
    """
    equal = [size == count for size, count in zip(shape, scales, strict=True)]
    first = equal.index(False) if False in equal else len(shape)
    last = len(shape) - equal[::-1].index(False) if False in equal else len(shape)
    if any(count != 1 for count in scales[first + 1 : last]):
        return None
    columns = math.prod(shape[last:])
    groups = math.prod(scales[: first + 1]) if first < last else math.prod(shape)
    rows = math.prod(shape) // (groups * columns)
    if columns == 1:
        return _ScaleLayout(groups, 1, rows, per_column=False)
    return _ScaleLayout(groups, rows, columns, per_column=True)


def _scales_shape(shape, axes, block_axis):
    """Returns the shape of the amaxes of an array."""
    counts = [1 if axis in axes else size for axis, size in enumerate(shape)]
    if block_axis is not None:
        counts[block_axis] //= MXFP8_BLOCK
    return tuple(counts)


def _lower(ctx, target, plain, scales, *operands, **attributes):
    """Lowers to the engine's custom call, or to `plain`, a function of the operands.

    `scales` is the aval of the scales, or of the amaxes, of the first operand.
    """
    layout = None
    if _engine_runs(ctx):
        layout = _layout(ctx.avals_in[0].shape, scales.shape)
    if layout is None:
        return mlir.lower_fun(plain, multiple_results=False)(ctx, *operands)
    cpu_engine.register_targets()
    numbers = {
        name: np.int64(value) for name, value in dataclasses.asdict(layout).items()
    }
    rule = jax.ffi.ffi_lowering(target)
    return rule(ctx, *operands, **numbers, **attributes)


def _engine_runs(ctx):
    """Returns whether the CPU engine can run the custom call of a lowering.

    Exported programs contain none, so that they need no jax_ub.
    """
    module = ctx.module_context
    return (
        tuple(ctx.platforms or module.platforms) == ("cpu",)
        and not module.lowering_parameters.for_export
        and cpu_engine.why_not() is None
        and mesh.has_local_arrays(ctx)
        and not any(map(has_symbolic_sizes, ctx.avals_in))
        and all(math.prod(aval.shape) for aval in ctx.avals_in)
    )


def _primitive(name, abstract, batch, lower):
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower)
    return primitive


def _abstract_amax(x, *, axes, block_axis):
    shape = _scales_shape(x.shape, axes, block_axis)
    return vma.result_aval(shape, np.dtype(np.float32), vma.axes_of(x), like=x)


def _batch_amax(operands, dims, *, axes, block_axis):
    (x,) = _mapped_in_front(operands, dims)
    axes = tuple(axis + 1 for axis in axes)
    block_axis = None if block_axis is None else block_axis + 1
    return _amax(Method.AUTO, x, axes=axes, block_axis=block_axis), 0


def _mapped_in_front(operands, dims):
    """Moves the mapped axis of each operand to the front. Repeats unmapped operands."""
    pairs = list(zip(operands, dims, strict=True))
    size = next(x.shape[dim] for x, dim in pairs if dim is not None)
    return [batching.bdim_at_front(x, dim, size) for x, dim in pairs]


def _lower_amax(ctx, x, *, axes, block_axis):
    plain = functools.partial(_plain_amax, axes=axes, block_axis=block_axis)
    keeps_nan = block_axis is not None
    return _lower(ctx, "jax_ub.amax", plain, ctx.avals_out[0], x, keeps_nan=keeps_nan)


def _abstract_cast(x, scales, *, dtype):
    return vma.result_aval(x.shape, dtype, vma.axes_of(x, scales), like=x)


def _batch_cast(operands, dims, *, dtype):
    operands = _mapped_in_front(operands, dims)
    return _cast(Method.AUTO, *operands, dtype=dtype), 0


def _lower_cast(ctx, x, scales, *, dtype):
    plain = functools.partial(scaled_array.cast, dtype=dtype)
    return _lower(ctx, "jax_ub.cast", plain, ctx.avals_in[1], x, scales)


_amax_p = _primitive("jax_ub_amax", _abstract_amax, _batch_amax, _lower_amax)
_cast_p = _primitive("jax_ub_cast", _abstract_cast, _batch_cast, _lower_cast)
