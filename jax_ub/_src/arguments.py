"""Checks options that many layers share, such as `dtype` and `kernel_init`.

Arrays and sizes are checked in `shapes`; methods and mesh axes are checked where they
are used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError, UnknownNameError, shown


def check(op: str, **options: Any) -> None:
    """Checks the options of a layer or an op, each by the rule for its name.

    Options without a rule in `_CHECKS` are ignored.

    Raises:
        ShapeContractError: if an option has the wrong type or is out of range.
        UnknownNameError: if a name is not a string, or a flag is neither true nor
            false.
    """
    for name, value in options.items():
        if name in _CHECKS:
            _CHECKS[name](op, name, value)


def check_function(op: str, name: str, value: Any) -> None:
    """Raises an error unless a value is callable."""
    if not callable(value):
        raise ShapeContractError(
            f"{op}: {name} = {shown(value)} is of type {type(value).__name__}, not a "
            "function. Pass one."
        )


def check_dtype(op: str, name: str, value: Any) -> None:
    """Raises an error unless a value is a floating-point dtype."""
    dtype = None if shapes.is_array(value) else shapes.dtype_of(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ShapeContractError(
            f"{op}: {name} = {shown(value)} is not a floating-point dtype. Pass one, "
            "for example jnp.bfloat16."
        )


def check_name(op: str, name: str, value: Any) -> None:
    """Raises an error unless a name is a string."""
    if not isinstance(value, str):
        raise UnknownNameError(
            f"{op}: {name} = {shown(value)} is of type {type(value).__name__}. Pass "
            f'the name of a layer, such as "qkv", or leave {name} out.'
        )


def check_metadata(op: str, name: str, value: Any) -> None:
    """Raises an error unless a value is a mapping with string keys."""
    is_mapping = isinstance(value, Mapping)
    if not is_mapping or not all(isinstance(key, str) for key in value):
        raise ShapeContractError(
            f"{op}: {name} = {shown(value)} is not a dictionary of names and values. "
            f"Pass one, or leave {name} out."
        )


def check_rngs(op: str, name: str, value: Any) -> None:
    """Raises an error unless a value has parameter keys, as `nnx.Rngs.params` does."""
    if not callable(getattr(value, "params", None)):
        raise ShapeContractError(
            f"{op}: {name} = {shown(value)} has no keys for parameters. Pass, for "
            "example, nnx.Rngs(0)."
        )


def promoted(
    op: str, promote: Callable[[], Any], given: Sequence[Any]
) -> tuple[Any, ...]:
    """Calls a layer's `promote_dtype` function, and checks the arrays it returns.

    Args:
        op: the layer's name, for errors.
        promote: a function without arguments that calls `promote_dtype`.
        given: the arrays that are promoted, some of which may be None.

    Returns:
        One array for each array of `given`, and None for None.

    Raises:
        ShapeContractError: if the arrays have no common dtype, or if `promote_dtype`
            does not return one array for each.
    """
    try:
        arrays = promote()
    except (TypeError, ValueError) as error:
        dtypes = [str(array.dtype) for array in given if array is not None]
        raise ShapeContractError(
            f"{op}: promote_dtype failed for inputs, kernel and bias of {dtypes}: "
            f"{shown(str(error))}. Convert the inputs, or pass dtype=."
        ) from error
    fits = isinstance(arrays, tuple | list) and len(arrays) == len(given)
    if not fits or not all(
        after is None if before is None else shapes.is_array(after)
        for before, after in zip(given, arrays, strict=True)
    ):
        raise ShapeContractError(
            f"{op}: promote_dtype returned {shown(arrays)}, not an array for each of "
            f"the {len(given)} that it was given. Pass a function as in flax."
        )
    return tuple(arrays)


def check_precision(op: str, name: str, value: Any) -> None:
    """Raises an error unless `jax.lax.dot` accepts a value as a precision."""
    values = value if isinstance(value, tuple) else (value,)
    kinds = str | lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset
    if not all(isinstance(each, kinds) for each in values):
        raise ShapeContractError(
            f"{op}: {name} = {shown(value)} is not a precision. Pass a "
            "jax.lax.Precision or None."
        )


def _or_none(check_value: Callable[[str, str, Any], None]):
    def check_option(op, name, value):
        if value is not None:
            check_value(op, name, value)

    return check_option


_FLAGS = [
    "accumulate_into_main_grad",
    "approximate",
    "backward_quantized",
    "broadcast_dropout",
    "forward_quantized",
    "in_place",
    "is_causal",
    "main_grad",
    "normalize_qk",
    "return_layernorm_output",
    "sequence_parallel",
    "tensor_parallel",
    "use_bias",
    "zero_centered_gamma",
]
_CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    **dict.fromkeys(("param_dtype", "grad_dtype"), check_dtype),
    **dict.fromkeys(("dtype", "preferred_element_type"), _or_none(check_dtype)),
    **dict.fromkeys(("kernel_init", "bias_init", "promote_dtype"), check_function),
    "scale_init": _or_none(check_function),
    **dict.fromkeys(("kernel_metadata", "bias_metadata"), check_metadata),
    "precision": _or_none(check_precision),
    "rngs": check_rngs,
    "ub_name": _or_none(check_name),
    **dict.fromkeys(
        ("deterministic", "reduce_in_backward"), _or_none(shapes.check_flag)
    ),
    **dict.fromkeys(_FLAGS, shapes.check_flag),
}
