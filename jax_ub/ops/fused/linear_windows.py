"""What the fusions around a linear share: how a window begins, and one GEMM for it."""

from collections.abc import Sequence

import jax
import numpy as np

from jax_ub.ops.basic import linear_products as products
from jax_ub.ops.basic.add_extra_input import AddExtraInput, check_extra_input
from jax_ub.ops.basic.basic_linear import BasicLinear
from jax_ub.ops.basic.bias import Bias
from jax_ub.ops.operation import Extras, Op, Params, Residuals

REDUCED = "its result is reduced before anything is added"


def is_unreduced(op: Op) -> bool:
    """Whether it is a linear whose product is its result.

    A row-parallel one is reduced first, so what is added cannot be added in the GEMM.
    """
    return isinstance(op, BasicLinear) and op.tensor_parallel_mode != "row"


def forward(
    linear: BasicLinear,
    bias: Bias | None,
    params: Sequence[Params],
    x: jax.Array,
    *,
    residual: jax.Array | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array, Residuals]:
    """Computes `scale * x @ kernel + bias + residual` in one GEMM.

    Args:
        linear: the linear.
        bias: what is behind it, or None.
        params: those of the linear, then those of the bias.
        x: the linear's input.
        residual: of the result's shape, written in place if its buffer is free.
        scale: factor of the product.

    Returns:
        The result, in the dtype of the bias's, and the linear's residuals.
    """
    dtype = None if bias is None or bias.dtype is None else np.dtype(bias.dtype)
    return products.forward(
        linear,
        params[0],
        x,
        bias=None if bias is None else params[1]["bias"],
        residual=residual,
        scale=scale,
        out_dtype=dtype,
    )


def extra_input(
    add: AddExtraInput,
    extras: Extras,
    x: jax.Array,
    kernel: jax.Array,
    rows: int,
) -> jax.Array:
    """What is added to a linear's result, checked before it gets there.

    Args:
        add: the operation that would add it.
        extras: its extra inputs.
        x: the linear's input.
        kernel: the linear's kernel.
        rows: of the result; see `rows_of`.

    Raises:
        ShapeContractError: if it has not the shape of the result.
    """
    (extra,) = extras
    assert extra is not None
    leading = (*x.shape[:-2], rows) if x.ndim > 1 else ()
    check_extra_input(add, (*leading, kernel.shape[1]), extra)
    return extra


def rows_of(linear: BasicLinear, x: jax.Array) -> int:
    """How many rows the result of a linear that reduces nothing has."""
    rows = x.shape[-2] if x.ndim > 1 else 1
    if linear.tensor_parallel_mode == "column" and linear.sequence_parallel:
        return rows * linear.call_config().num_ranks
    return rows
