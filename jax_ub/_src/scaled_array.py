"""`ScaledArray`: FP8 values with the scales that multiply them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

from jax_ub._src import dtypes, reference
from jax_ub._src.checks import dtype_of, is_array
from jax_ub._src.errors import ShapeContractError, shown

# Block size of MXFP8: the number of consecutive values along the contracted dimension
# that share an e8m0 scale.
MXFP8_BLOCK = 32
_OP = "ScaledArray"
_FIELDS = ("values", "scales", "source")


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
        # Only arrays are checked, since JAX also creates this pytree with other leaves,
        # such as partition specs.
        if is_array(self.values) and is_array(self.scales):
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
        """Returns what a scale belongs to: "tensor", "row" (or column) or "block"."""
        if self.scales.dtype == jnp.float8_e8m0fnu:
            return "block"
        return "row" if any(size != 1 for size in self.scales.shape) else "tensor"

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Returns `values * scales`, computed in f32 and rounded once.

        The result has no gradient with respect to `source`.

        Args:
            dtype: f32, bf16 or f16; None takes the dtype of `source`, or bf16.

        Raises:
            ShapeContractError: if `dtype` is not a result dtype.
        """
        dtype = self.wide_dtype if dtype is None else dtype_of(dtype)
        if dtype not in dtypes.RESULTS:
            raise ShapeContractError(
                f"ScaledArray.dequantize: dtype = {shown(dtype)} is not a result. "
                f"Use {dtypes.listed(dtypes.RESULTS)}."
            )
        return reference.dequantize(self.values, self.scales).astype(dtype)

    @property
    def wide_dtype(self) -> np.dtype:
        """Returns the dtype of `source` and its gradient; bf16 without a source."""
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
    """Returns whether a value is a `ScaledArray`, for example as `is_leaf` in trees."""
    return isinstance(value, ScaledArray)


def without_source(operand: ScaledArray) -> ScaledArray:
    """Returns a copy whose `source`, the array that receives the gradient, is None."""
    return ScaledArray(operand.values, operand.scales)


def with_scalar_scale(operand: ScaledArray) -> ScaledArray:
    """Returns an FP8 array with its only scale reshaped to a scalar."""
    return ScaledArray(operand.values, operand.scales.reshape(()), operand.source)


def cotangent_of_scaled(gradient: jax.Array) -> ScaledArray:
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
        # Compares by equality, because symbolic sizes of `jax.export` have no order.
        if count != 1:
            raise ShapeContractError(
                f"{found}: {count} blocks of {size} along axis {axis}. {fix} Scales of "
                f"blocks are float8_e8m0fnu."
            )
    is_row = len(blocks) == 1 or any(n == size == 1 for size, n in pairs)
    if scales.size != 1 and not is_row:
        raise ShapeContractError(
            f"{found}: only the contracted dimension of row scales has size 1. {fix}"
        )
