"""`ScaledArray`: FP8 values with the scales that multiply them; how to compute both."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import DTypeLike

from jax_ub._src import dtypes, reference
from jax_ub._src.checks import check_array, dtype_of, is_array
from jax_ub._src.errors import ShapeContractError, shown

# Block size of MXFP8: the number of consecutive values along the contracted dimension
# that share an e8m0 scale.
MXFP8_BLOCK = 32
_OP = "ScaledArray"
_FIELDS = ("values", "scales", "source")
# Lower bound of the amax (largest absolute value) of a row in `row_scales`, as in
# torchao.
_ROW_EPSILON = 1e-12
# The width of the significand and the bias of the exponent of f32. _SIGNIFICAND_OF_MAX
# is the significand of 1.75: in both FP8 formats, the largest number is 1.75 times a
# power of two.
_SIGNIFICAND_BITS, _SIGNIFICAND_OF_MAX, _EXPONENT_BIAS = 23, 0x600000, 127


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """An FP8 array with scales: it represents `values * scales`.

    It is a pytree, so that it passes through `jax.jit`, `jax.vmap`, `jax.lax.scan` and
    `jax.shard_map`. `ub.quantize` returns one, and `ub.linear`, `ub.all_gather_matmul`,
    `ub.matmul_reduce_scatter` and `ub.matmul_all_reduce` take it as `x` and `w`. The
    scales are one of

    - one per tensor, f32: a scalar, or all sizes 1;
    - one per row of activations or per column of a kernel, f32: `[..., M, 1]` or
      `[1, N]`;
    - one per block of 32 values along the contracted dimension, float8_e8m0fnu:
      `[..., M, K/32]`, or `[K/32, N]` for a kernel.

    A kernel of a Flax layer may have several contracted dimensions, for example
    `[heads, head_dim, N]`. Its scales have the shape `[1, 1, N]`, or `[heads,
    head_dim/32, N]`.

    The gradient of FP8 values would be FP8. `source` is therefore the array that
    receives the gradient, in its own dtype.

    Transformer Engine: the quantized tensors of `transformer_engine.pytorch.tensor`.

    Attributes:
        values: float8_e4m3fn or float8_e5m2.
        scales: the factors of the values.
        source: the array that was quantized, or None.
    """

    values: jax.Array
    scales: jax.Array
    source: jax.Array | None = None

    def __post_init__(self):
        # Other leaves, such as partition specs, are not checked.
        if is_array(self.values) or is_array(self.scales):
            _check(self.values, self.scales, self.source)

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key(name), getattr(self, name)) for name in _FIELDS], None

    def tree_flatten(self):
        return (self.values, self.scales, self.source), None

    @classmethod
    def tree_unflatten(cls, _, leaves: Any) -> "ScaledArray":
        made = object.__new__(cls)
        for name, leaf in zip(_FIELDS, leaves, strict=True):
            object.__setattr__(made, name, leaf)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of `values`, which is also the shape of `source`."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """Returns the FP8 dtype of `values`, not the wider dtype of `source`."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the FP8 array `values`."""
        return self.values.ndim

    @property
    def scaling(self) -> str:
        """Returns what shares a scale: a "tensor", a "row" (or column) or a "block"."""
        if self.scales.dtype == jnp.float8_e8m0fnu:
            return "block"
        return "row" if any(size != 1 for size in self.scales.shape) else "tensor"

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Returns the array in a wider dtype: `values * scales`, rounded once.

        The result has no gradient with respect to `source`. In f16, 2^16 becomes 65504,
        because FP8 rounds the largest f16 numbers up to 2^16.

        Args:
            dtype: f32, bf16 or f16; None takes the dtype of `source`, or bf16.

        Raises:
            ShapeContractError: if `dtype` is not a result dtype.
        """
        found = self.wide_dtype if dtype is None else dtype_of(dtype)
        if found not in dtypes.RESULTS:
            raise ShapeContractError(
                f"ScaledArray.dequantize: dtype = {shown(dtype)} is not a result. "
                f"Use {dtypes.listed(dtypes.RESULTS)}."
            )
        return reference.dequantize(self.values, self.scales, found)

    @property
    def wide_dtype(self) -> np.dtype:
        """Returns the dtype of `source` and its gradient, or bf16 without a source."""
        return jnp.dtype(jnp.bfloat16) if self.source is None else self.source.dtype


export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="jax_ub.ScaledArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def map_scaled(function: Callable[[ScaledArray], Any], tree: Any) -> Any:
    """Applies a function to each `ScaledArray` in a tree, and to no other leaf."""

    def apply(leaf):
        return function(leaf) if is_scaled(leaf) else leaf

    return jax.tree.map(apply, tree, is_leaf=is_scaled)


def is_scaled(value: Any) -> bool:
    """Returns whether a value is a `ScaledArray`. Used as `is_leaf` of `jax.tree`."""
    return isinstance(value, ScaledArray)


def without_source(operand: ScaledArray) -> ScaledArray:
    """Returns a copy without `source`, the array that receives the gradient."""
    return ScaledArray(operand.values, operand.scales)


def with_scale_of_shape(operand: ScaledArray, shape: tuple[int, ...]) -> ScaledArray:
    """Reshapes the single scale of an FP8 array to `shape`: () or (1, ..., 1)."""
    return ScaledArray(operand.values, operand.scales.reshape(shape), operand.source)


def with_scalar_scale(operand: ScaledArray) -> ScaledArray:
    """Reshapes the scale of an FP8 array to a scalar if there is one per tensor."""
    is_tensor = operand.scaling == "tensor"
    return with_scale_of_shape(operand, ()) if is_tensor else operand


def cotangent_of_scaled(gradient: jax.Array | None) -> ScaledArray:
    """Returns the cotangent of a `ScaledArray`: the gradient of its `source` only."""
    return ScaledArray.tree_unflatten(None, (None, None, gradient))


def dequantized(operand: Any) -> Any:
    """Dequantizes a `ScaledArray`. Returns any other operand unchanged."""
    return operand.dequantize() if is_scaled(operand) else operand


def source_of(operand: Any) -> Any:
    """Returns a `ScaledArray`'s source, the array that was quantized, or None.

    Any other operand is returned as it is.
    """
    return operand.source if is_scaled(operand) else operand


def values_of(operand: Any) -> Any:
    """Returns the FP8 values of a `ScaledArray`, or any other operand unchanged."""
    return operand.values if is_scaled(operand) else operand


def _check(values, scales, source):
    check_array(_OP, "values", values)
    check_array(_OP, "scales", scales)
    if values.dtype not in dtypes.FP8:
        raise ShapeContractError(
            f"{_OP}: values is {values.dtype}, which is none of "
            f"{dtypes.FP8[0]} and {dtypes.FP8[1]}. Quantize it with ub.quantize."
        )
    if scales.dtype not in (jnp.float32, jnp.float8_e8m0fnu):
        raise ShapeContractError(
            f"{_OP}: scales is {scales.dtype}. Use float32, or float8_e8m0fnu for "
            f"blocks of {MXFP8_BLOCK}."
        )
    _check_scale_shape(values, scales)
    if source is None:
        return
    if not is_array(source) or source.shape != values.shape:
        found = tuple(source.shape) if is_array(source) else shown(source)
        raise ShapeContractError(
            f"{_OP}: source is {found} for values {values.shape}. Pass the array that "
            "was quantized, or None."
        )
    if source.dtype not in dtypes.RESULTS:
        raise ShapeContractError(
            f"{_OP}: source is {source.dtype}, but it receives a gradient of dtype "
            f"{dtypes.listed(dtypes.RESULTS)}. Convert it before it is quantized."
        )


def _check_scale_shape(values, scales):
    if scales.ndim == 0 and scales.dtype == jnp.float32:
        return
    found = f"{_OP}: scales has shape {scales.shape} for values {values.shape}"
    fix = f"Use one scale, one per row or column, or blocks of {MXFP8_BLOCK}."
    if scales.ndim != values.ndim:
        raise ShapeContractError(f"{found}: the dimensions differ. {fix}")
    pairs = list(zip(values.shape, scales.shape, strict=True))
    if any(count == 0 or size % count for size, count in pairs):
        raise ShapeContractError(f"{found}: the sizes do not divide. {fix}")
    blocks = {axis: size // n for axis, (size, n) in enumerate(pairs) if n != size}
    if scales.dtype != jnp.float32:
        if list(blocks.values()) != [MXFP8_BLOCK]:
            raise ShapeContractError(
                f"{found}: blocks of {tuple(blocks.values())} in {scales.dtype}. Use "
                f"blocks of {MXFP8_BLOCK} along the contracted dimension, or float32."
            )
        return
    for axis, size in blocks.items():
        count = scales.shape[axis]
        # Sizes are compared by equality, because symbolic sizes of `jax.export` have no
        # order.
        if count != 1:
            raise ShapeContractError(
                f"{found}: {count} blocks of {size} along axis {axis}. {fix} Scales of "
                f"blocks are float8_e8m0fnu."
            )
    # Only contracted dimensions have size 1 in row scales. They are consecutive, so
    # that all dimensions between the first and the last one have this size.
    between = scales.shape[min(blocks, default=0) : max(blocks, default=-1) + 1]
    is_row = 1 in scales.shape and all(count == 1 for count in between)
    if scales.size != 1 and not is_row:
        raise ShapeContractError(
            f"{found}: only the contracted dimension of row scales has size 1, or "
            f"several consecutive ones. {fix}"
        )


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def amax_of(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the largest |x| over `axes`, in f32. The reduced axes keep size 1.

    It is infinite if there is a NaN: `jax.lax.pmax` would drop a NaN, and the recipes
    treat both alike.
    """
    amax = _largest_absolute_values(x, axes)
    return jnp.where(jnp.isnan(amax), jnp.inf, amax)


def _largest_absolute_values(x, axes):
    """Returns the maxima of |x| over axes, in f32. NaNs in x result in NaN.

    The bits are compared as integers, which have the same order as the numbers |x|,
    because XLA:CPU's maximum of floating-point numbers drops NaNs in some arrays of at
    least 4096 elements.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), f"int{8 * x.dtype.itemsize}")
    largest = jnp.max(bits, axis=axes, keepdims=True)
    return lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def cast(x: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """Returns x / scales, computed in f32, clipped and rounded once to `dtype`.

    A NaN stays a NaN, and an infinity becomes the largest number.
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        quotients = _divided_by_blocks(x, scales)
    else:
        quotients = x.astype(jnp.float32) * (1.0 / scales)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(quotients, -largest, largest).astype(dtype)


def _divided_by_blocks(x, scales):
    bits = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    exponents = reference.expanded(_EXPONENT_BIAS - bits, x.shape)
    return reference.times_power_of_two(x.astype(jnp.float32), exponents)


@functools.partial(jax.jit, static_argnames=("dtype", "least"), inline=True)
def row_scales(amax: jax.Array, dtype, least: float = _ROW_EPSILON) -> jax.Array:
    """Returns the smallest f32 power of two s with amax / s <= finfo(dtype).max.

    An amax below `least` counts as `least`. The scale of an infinite or NaN amax is 1.
    """
    exponents = _exponents_above(jnp.maximum(amax, least), dtype)
    scales = reference.times_power_of_two(jnp.ones_like(amax), exponents)
    return jnp.where(jnp.isfinite(amax), scales, 1.0)


@functools.partial(jax.jit, static_argnames="axis", inline=True)
def amax_of_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Returns the largest |x| of each block of 32 values along `axis`, in f32.

    It is NaN if there is a NaN.
    """
    axis %= x.ndim
    num_blocks = x.shape[axis] // MXFP8_BLOCK
    blocks = x.reshape(*x.shape[:axis], num_blocks, MXFP8_BLOCK, *x.shape[axis + 1 :])
    return jnp.squeeze(_largest_absolute_values(blocks, axis + 1), axis + 1)


@functools.partial(jax.jit, static_argnames=("dtype", "margin"), inline=True)
def block_scales(amax: jax.Array, dtype, margin: int = 0) -> jax.Array:
    """Returns the scale of each block, as float8_e8m0fnu, from the largest |x| there.

    An amax of zero gives 2^-127, an infinite one 2^127, and NaN gives NaN.
    """
    exponents = _exponents_above(amax, dtype) + margin
    bits = jnp.clip(exponents + _EXPONENT_BIAS, 0, 254)
    # An infinite amax gets the largest exponent, and a zero amax the smallest.
    # `_exponents_above` returns other exponents for them.
    bits = jnp.where(jnp.isinf(amax), 254, jnp.where(amax == 0, 0, bits))
    bits = jnp.where(jnp.isnan(amax), 255, bits).astype(jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)


def _exponents_above(amax, dtype):
    """Returns the smallest e with amax <= 2^e * m, where m is the maximum of `dtype`.

    A logarithm would be wrong next to powers of two.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    significand = bits & ((1 << _SIGNIFICAND_BITS) - 1)
    exponent = (bits >> _SIGNIFICAND_BITS) - _EXPONENT_BIAS
    of_max = math.frexp(jnp.finfo(dtype).max)[1] - 1
    is_above = (significand > _SIGNIFICAND_OF_MAX).astype(jnp.int32)
    return exponent - of_max + is_above


def changes_along(scales: Any, shape: Sequence[int], axis: int) -> bool:
    """Returns whether the scales of FP8 values change along `axis`.

    The scales of consecutive blocks along the axis do not count as a change.
    """
    if scales.dtype == jnp.float8_e8m0fnu:
        return scales.shape[axis] == shape[axis]
    return scales.shape[axis] != 1


def converted(
    values: jax.Array, scales: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Rescales FP8 values so that their scales do not change along `axis`.

    Args:
        values: the FP8 values.
        scales: one for each row or column, f32, or each block of 32 values along
            another axis, float8_e8m0fnu. They are powers of two.
        axis: the axis that a GEMM contracts.

    Returns:
        Values and scales of the same numbers. The scales are constant along `axis`, or
        belong to blocks along it. Only values that become subnormal are rounded.
    """
    x = reference.dequantize(values, scales)
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = block_scales(amax_of_blocks(x, axis), values.dtype)
    else:
        scales = row_scales(amax_of(x, (axis,)), values.dtype)
    return cast(x, scales, values.dtype), scales
