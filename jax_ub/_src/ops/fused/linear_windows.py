"""Functions shared by the fused operations that begin with a linear."""

from collections.abc import Sequence

import jax
import numpy as np

from jax_ub._src.ops.basic import linear_products as products
from jax_ub._src.ops.basic.add_extra_input import AddExtraInput, check_extra_input
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.operation import Extras, Op, Params, Residuals

REDUCED = "its result is reduced before anything is added"


def is_unreduced(op: Op) -> bool:
    """Returns whether `op` is a linear whose result is not reduced over the ranks.

    The result of a row-parallel linear is reduced before a bias or a residual is added,
    so its GEMM cannot add them.
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
        linear: a linear that is not row parallel.
        bias: the bias after the linear, or None.
        params: the parameters of the linear, then the parameters of the bias.
        x: the input of the linear.
        residual: array with the shape of the result, which reuses its buffer if it is
            not read later.
        scale: factor of the product.

    Returns:
        The result, in the dtype of `bias` if that is set, and the linear's residuals.
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
    """Checks and returns the array that is added to the result of a linear.

    Args:
        add: the operation that takes the extra input.
        extras: the extra inputs of `add`; exactly one.
        x: the input of the linear.
        kernel: the kernel of the linear.
        rows: number of rows of the result; see `rows_of`.

    Raises:
        ShapeContractError: if the extra input does not have the shape of the result.
    """
    (extra,) = extras
    assert extra is not None
    leading = (*x.shape[:-2], rows) if x.ndim > 1 else ()
    check_extra_input(add, (*leading, kernel.shape[1]), extra)
    return extra


def rows_of(linear: BasicLinear, x: jax.Array) -> int:
    """Returns the number of rows (tokens) of a linear's result on each rank.

    The linear must not be row parallel. A column-parallel linear with sequence
    parallelism gathers the tokens of all ranks.
    """
    rows = x.shape[-2] if x.ndim > 1 else 1
    if linear.tensor_parallel_mode == "column" and linear.sequence_parallel:
        return rows * linear.call_config().num_ranks
    return rows
