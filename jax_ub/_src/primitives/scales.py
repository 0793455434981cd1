"""The scales of FP8 operands, as the primitives take them and gather them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives import vma
from jax_ub._src.scaled_array import ScaledArray, values_of

Operand = jax.Array | ScaledArray


def scales_of(
    activations: Sequence[Operand], kernels: Sequence[Operand] = ()
) -> tuple[jax.Array, ...]:
    """Returns the FP8 scales of each GEMM operand, or () if no operand is FP8.

    A wide operand has the scale 1. A scale that is a scalar belongs to a tensor, and
    has shape [1] here. If another operand has scales of rows or blocks, it is repeated
    for each row of an activation.
    """
    arrays = (*activations, *kernels)
    if not any(isinstance(x, ScaledArray) for x in arrays):
        return ()
    scales = [
        x.scales if isinstance(x, ScaledArray) else jnp.float32(1) for x in arrays
    ]
    if all(scale.ndim == 0 for scale in scales):
        return tuple(scale.reshape(1) for scale in scales)
    num_rows = len(activations)
    rows = zip(scales, activations, strict=False)
    return (
        *(_repeated(scale, (*x.shape[:-1], 1)) for scale, x in rows),
        *(_repeated(scale, (1, 1)) for scale in scales[num_rows:]),
    )


def _repeated(scales, shape):
    return scales if scales.ndim else jnp.full(shape, scales)


def with_f32_factors(
    run: Callable[..., Sequence[jax.Array]],
    x: Operand,
    dys: tuple[Operand, ...],
    main_grads: tuple[jax.Array, ...] | None,
    out_dtype,
) -> tuple[jax.Array, ...]:
    """Calls `run(x, dys, main_grads, dtype)`, which computes x^T dy_i + main_grad_i.

    The GEMM contracts rows, so it multiplies the values by scales of rows or blocks, as
    bf16, which is exact for powers of two. If only some operands have such scales, it
    would also multiply the values of the others by their scale per tensor, which is no
    power of two. This function multiplies the f32 sums by it.

    Returns:
        All results of `run`, of which the sums are the first.
    """
    kinds = {a.scales.ndim > 0 for a in (x, *dys) if isinstance(a, ScaledArray)}
    if len(kinds) < 2:
        return tuple(run(x, dys, main_grads, out_dtype))

    def split(operand):
        if not isinstance(operand, ScaledArray) or operand.scales.ndim:
            return operand, jnp.float32(1)
        return ScaledArray(operand.values, jnp.float32(1)), operand.scales

    (x, factor), *pairs = map(split, (x, *dys))
    results = run(x, tuple(dy for dy, _ in pairs), None, np.dtype(np.float32))
    sums = [
        reference.add(dw * (factor * of_dy), addend, out_dtype=out_dtype)
        for dw, (_, of_dy), addend in zip(
            results, pairs, main_grads or (None,) * len(pairs), strict=False
        )
    ]
    return (*sums, *results[len(sums) :])


def gathered_like(x: Operand, gathered: jax.Array, *scales: jax.Array) -> Operand:
    """Makes a `ScaledArray` of all-gathered FP8 values if x is a `ScaledArray`.

    `scales` has the gathered scales of rows, if there are any. They are ignored if x
    has one scale for the tensor, which `scales_of` has repeated for each row.
    """
    if not isinstance(x, ScaledArray):
        return gathered
    (rows,) = scales or (x.scales,)
    return ScaledArray(gathered, rows if x.scales.ndim else x.scales)


def packed(x: Operand) -> tuple[jax.Array, int]:
    """Appends the scales of each row to its FP8 values, so that both are sent together.

    Returns:
        The array, and the number of bytes of scales in each row: 0 for an operand that
        is not FP8, or has one scale per tensor, which is left out.
    """
    if not isinstance(x, ScaledArray) or x.scales.ndim == 0:
        return values_of(x), 0
    scales = vma.pcast_varying(x.scales, vma.axes_of(x.values))
    values, scales = (jnp.asarray(part).view(jnp.uint8) for part in (x.values, scales))
    rows = jnp.concatenate([values, scales], -1)
    return rows.view(x.dtype), scales.shape[-1]


def unpacked(x: Operand, gathered: jax.Array) -> Operand:
    """Splits the all-gathered result of `packed(x)` into FP8 values and scales."""
    if not isinstance(x, ScaledArray) or x.scales.ndim == 0:
        return gathered_like(x, gathered)
    rows = gathered.view(jnp.uint8)
    values, scales = rows[..., : x.shape[-1]], rows[..., x.shape[-1] :]
    return ScaledArray(values.view(x.dtype), scales.view(x.scales.dtype))
