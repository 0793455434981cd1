"""Checks shapes, dtypes and scalar arguments of ops while they are traced.

Of arrays and avals the checks read `shape` and `dtype` only. Each check raises
`ShapeContractError`, or `UnknownNameError` for a flag, with the op, value and fix.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.export import is_symbolic_dim

from jax_ub._src import dtypes
from jax_ub._src.errors import (
    ShapeContractError,
    UbError,
    UnknownNameError,
    UnsupportedOverlapError,
    shown,
)
from jax_ub._src.scalars import LARGEST_SIZE, is_number, is_size

_F64 = np.dtype(np.float64)


def is_hashable(value) -> bool:
    """Returns whether a value is hashable, so that JAX can use it in a cache key."""
    try:
        hash(value)
    except Exception:  # a user's __hash__ may raise any error
        return False
    return True


def has_symbolic_sizes(array) -> bool:
    """Returns whether an array or aval has symbolic dimensions of `jax.export`."""
    return any(is_symbolic_dim(size) for size in array.shape)


def is_array(value) -> bool:
    """Returns whether JAX accepts a value as an array. False for Python numbers."""
    is_one = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_one or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return False
    try:
        return jax.typeof(value) is not None
    except (TypeError, ValueError):  # for example an array of strings
        return False


def dtype_of(value) -> np.dtype | None:
    """Converts a value to a NumPy dtype. Returns None if it does not name a dtype."""
    if value is None or isinstance(value, tuple | list | dict):
        return None
    try:
        return jnp.dtype(value)
    except Exception:  # the value's attributes, which NumPy reads, may raise anything
        return None


def check_initial(op: str, name: str, values, shape: Sequence[int]) -> None:
    """Raises an error unless an initializer returned an array of shape `shape`."""
    if not is_array(values) or tuple(values.shape) != tuple(shape):
        raise ShapeContractError(
            f"{op}: {name} returned {shown(values)} for shape {tuple(shape)}. Pass a "
            "function of (key, shape, dtype), as in jax.nn.initializers."
        )


def option_check(
    is_valid: Callable[[Any], bool],
    expected: str,
    fix: str,
    error: type[UbError] = ShapeContractError,
) -> Callable[[str, str, Any], None]:
    """Returns a function that checks an option's value and raises `error` if invalid.

    The error says that the value is not `expected`, and what to do: `fix`.
    """

    def check(op: str, name: str, value: Any) -> None:
        if not is_valid(value):
            raise error(f"{op}: {name} = {shown(value)} is not {expected}. {fix}")

    return check


def _is_key(value):
    if isinstance(value, jax.Array) and value.ndim == 0:
        return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return is_array(value) and value.dtype == jnp.uint32 and value.ndim == 1


def _is_flag(value):
    return isinstance(value, bool | np.bool_ | int) and value in (0, 1)


# Checks that a value is a PRNG key of `jax.random`, typed or uint32.
check_key = option_check(
    _is_key, "one key of jax.random", "Pass, for example, jax.random.key(0)."
)
check_size = option_check(
    is_size,
    "a positive integer",
    f"Pass the global size, which is at most {LARGEST_SIZE}.",
)
# Checks the epsilon of a norm. It must be less than 2**31, because JAX rejects larger
# integers.
check_epsilon = option_check(
    lambda value: is_number(value) and 0 <= value < 1 << 31,
    "a number of at least 0 and less than 2**31",
    "Pass one, for example 1e-6.",
)
# Checks a dropout rate: the probability with which an element is set to zero.
check_rate = option_check(
    lambda value: is_number(value) and 0 <= value < 1,
    "a probability",
    "Pass a number of at least 0 and less than 1.",
)
check_flag = option_check(_is_flag, "a bool", "Pass True or False.", UnknownNameError)


def check_array(op: str, name: str, array) -> None:
    """Raises an error unless a value is a numeric array, not a list or a PRNG key."""
    if not is_array(array):
        several = "; several kernels of all_gather_matmul go in a tuple"
        several = several if name == "w" else ""
        text = f"is of type {type(array).__name__}, but the op takes an array"
        if isinstance(array, jax.Array):  # such as a PRNG key
            text = f"has dtype {array.dtype}, but the op takes a numeric array"
        raise ShapeContractError(f"{op}: {name} {text}. Pass one{several}.")


def is_f64(array) -> bool:
    """Returns whether an array is f64, and JAX does not convert it to f32.

    Without `jax_enable_x64` JAX converts a NumPy f64 array to f32.
    """
    return array.dtype == _F64 == jax.dtypes.canonicalize_dtype(_F64)


def check_float(op: str, *, takes_f64: bool = False, **arrays) -> None:
    """Raises an error unless arrays are f32, bf16, f16 (f64 if `takes_f64`) or None."""
    for name, array in arrays.items():
        if array is None:
            continue
        check_array(op, name, array)
        check_float_dtype(op, name, array, takes_f64=takes_f64)


def check_float_dtype(op: str, name: str, array, *, takes_f64: bool) -> None:
    """Raises an error unless an array is f32, bf16 or f16 (or f64 if `takes_f64`)."""
    if array.dtype not in dtypes.OPERANDS and not (takes_f64 and is_f64(array)):
        # JAX converts a NumPy f64 array to f32, unless `jax_enable_x64` is set.
        is_converted = array.dtype == _F64 and not is_f64(array)
        call = (
            f"jnp.asarray({name})" if is_converted else f"{name}.astype(jnp.bfloat16)"
        )
        raise ShapeContractError(
            f"{op}: {name} is {array.dtype}, but the op takes "
            f"{dtypes.listed(dtypes.OPERANDS)}. Convert it, for example {call}."
        )


def check_out_dtype(op: str, out_dtype, default) -> jnp.dtype:
    """Returns the dtype of an op's result: `out_dtype`, or `default` if it is None.

    f32, bf16, f16 and `default` itself are accepted. `default` is the dtype of operands
    that have been checked, and may be f64.
    """
    if out_dtype is None:
        return jnp.dtype(default)
    dtype = dtype_of(out_dtype)
    if dtype is None or dtype not in (*dtypes.RESULTS, default):
        name = shown(out_dtype) if dtype is None else dtype
        raise ShapeContractError(
            f"{op}: out_dtype = {name} is not a result the op has. Use "
            f"{dtypes.listed(dtypes.RESULTS)}."
        )
    return dtype


def check_operands(
    op: str, x, w, *, x_name: str = "x", takes_f64: bool = False
) -> None:
    """Checks dtypes and dimensions of x [..., K] and w [K, N], but does not compare K.

    Both must have one floating-point dtype and not be empty, and `w`, an array or aval,
    must be a matrix.
    """
    check_float(op, takes_f64=takes_f64, **{x_name: x})
    check_float_dtype(op, "w", w, takes_f64=takes_f64)
    check_dtypes(op, **{x_name: x, "w": w})
    check_kernel(op, "w", w)
    check_not_empty(op, x_name, x)


def check_kernel(op: str, name: str, w) -> None:
    """Raises an error unless a kernel is a matrix [in, out] that is not empty."""
    if w.ndim != 2:
        raise ShapeContractError(
            f"{op}: {name} has shape {w.shape}, but a kernel is [in, out]. Reshape "
            "it to two dimensions."
        )
    check_not_empty(op, name, w)


def check_dtypes(op: str, **pair) -> None:
    """Raises an error unless two operands, such as x and w, have the same dtype."""
    (x_name, x), (w_name, w) = pair.items()
    if x.dtype != w.dtype:
        raise ShapeContractError(
            f"{op}: {x_name} is {x.dtype} and {w_name} is {w.dtype}, but both must "
            f"have one dtype. Convert one: {w_name}.astype({x_name}.dtype)."
        )


def check_not_empty(op: str, name: str, array) -> None:
    """Raises an error if an array has a dimension of size 0."""
    if 0 in array.shape:
        raise ShapeContractError(
            f"{op}: {name} has shape {array.shape}, which is empty. Leave the call out "
            "where there is nothing to compute."
        )


def check_rank(op: str, name: str, array, least: int = 2) -> None:
    """Raises an error unless a value is an array with at least `least` dimensions."""
    check_array(op, name, array)
    if array.ndim < least:
        wanted = "[..., rows, features]" if least == 2 else "[..., features]"
        raise ShapeContractError(
            f"{op}: {name} has shape {array.shape}, but the op takes {wanted}. Add "
            f"dimensions, for example {name}[None]."
        )


def check_contraction(
    op: str,
    x,
    w,
    num_ranks: int,
    sharded: str,
    if_transposed: str = "Kernels are [in, out]: pass w.T.",
) -> None:
    """Raises an error unless x [..., K] and w [K, N] agree in K.

    Args:
        op: the op's name.
        x: activations, `[..., K]`.
        w: kernel, `[K, N]`.
        num_ranks: size of the tensor-parallel mesh axis; 1 for a local op.
        sharded: the dimension of `w` that must be sharded: "in", "out", or "" for none.
        if_transposed: the fix if `w` has K as its second dimension.
    """
    k = x.shape[-1]
    if w.shape[0] == k:
        return
    found = f"{op}: x {x.shape} has K = {k}, but w {w.shape} has K = {w.shape[0]}."
    advice = _advice(k, w, num_ranks, sharded, if_transposed)
    raise ShapeContractError(f"{found} {advice}")


def _advice(k, w, num_ranks, sharded, if_transposed):
    if num_ranks > 1 and sharded == "out" and w.shape[0] * num_ranks == k:
        return (
            "The kernel is sharded along its first dimension; this op wants it along "
            "the second: in_specs P(None, axis_name) for w."
        )
    if num_ranks > 1 and sharded == "in" and w.shape[0] == k * num_ranks:
        return (
            "The kernel is not sharded along its first dimension; this op wants each "
            "rank's own rows: in_specs P(axis_name, None) for w."
        )
    if num_ranks > 1 and sharded == "in" and w.shape[0] * num_ranks == k:
        return (
            "The activations are not sharded along their features; this op wants each "
            "rank's own ones: in_specs P(..., axis_name) for x."
        )
    if w.shape[1] == k:
        return if_transposed
    return "Both must be equal."


def check_divides(op: str, x, num_ranks: int) -> None:
    """Raises an error unless `num_ranks` divides M, the rows of x [..., M, K]."""
    rows = x.shape[-2]
    if rows % num_ranks:
        padded = round_up(rows, num_ranks)
        raise ShapeContractError(
            f"{op}: x {x.shape} has {rows} rows (axis -2), which do not divide into "
            f"{num_ranks} ranks. Pad to {padded} rows."
        )


def check_shape(
    op: str, name: str, array, shape: tuple[int, ...], meaning: str
) -> None:
    """Raises an error unless an array is None or has shape `shape`."""
    if array is None:
        return
    check_array(op, name, array)
    if tuple(array.shape) != tuple(shape):
        raise ShapeContractError(
            f"{op}: {name} has shape {tuple(array.shape)}, but here it is {meaning}, "
            f"{tuple(shape)}. Pass an array of that shape."
        )


def check_addends(
    op: str,
    bias,
    residual,
    shape: tuple[int, ...],
    *,
    bias_name: str = "bias",
    takes_f64: bool = False,
) -> None:
    """Raises an error unless bias [N] and residual [..., N] fit the result [..., N]."""
    addends = {bias_name: bias, "residual": residual}
    check_float(op, takes_f64=takes_f64, **addends)
    check_shape(op, bias_name, bias, shape[-1:], "[N]")
    check_shape(op, "residual", residual, shape, "the result's shape")


def check_main_grad(op: str, main_grad, w) -> None:
    """Raises an error unless `main_grad`, the sum of dw, is f32 and of w's shape."""
    check_array(op, "main_grad", main_grad)
    check_shape(op, "main_grad", main_grad, w.shape, "the kernel's shape")
    if main_grad.dtype != jnp.float32:
        raise ShapeContractError(
            f"{op}: main_grad is {main_grad.dtype}, but gradients are accumulated in "
            "float32. Create it with jnp.zeros(w.shape, jnp.float32)."
        )


def mapped_with(
    value: jax.Array, other: jax.Array, text: Callable[[int], str]
) -> jax.Array:
    """Returns `value`, or raises an error if `jax.vmap` maps `other` but not `value`.

    JAX drops the check if the result is not used. The check adds nothing to the
    compiled program.
    """

    @custom_vmap
    def same(value, other):
        return value

    @same.def_vmap
    def same_of_mapped(axis_size, is_mapped, value, other):
        if is_mapped[1] and not is_mapped[0]:
            raise UnsupportedOverlapError(text(axis_size))
        if not is_mapped[0]:  # `jax.vmap` of a `jax.jvp` that maps only tangents
            return value, False
        # `same` is called again so that the batching rule also runs for each enclosing
        # jax.vmap.
        return same(value, other), is_mapped[0]

    return same(value, other)


def ceil_div(number: int, divisor: int) -> int:
    """Returns `number / divisor`, rounded up."""
    return -(-number // divisor)


def round_up(number: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is at least `number`."""
    return ceil_div(number, divisor) * divisor


def axis_tuple(axis_name: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Converts `axis_name` to a tuple of mesh axis names. None gives an empty tuple."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def check_axis_name(op: str, axis_name: str | tuple[str, ...] | None) -> None:
    """Raises an error unless a value is a mesh axis name, or a tuple of them."""
    axes = axis_tuple(axis_name)
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)} is not the name of a mesh axis. "
            'Pass the axis of the ranks, for example axis_name="tp".'
        )
    if len(set(axes)) < len(axes):
        raise ShapeContractError(
            f"{op}: axis_name = {shown(axis_name)} names a mesh axis twice. Name each "
            "once."
        )
