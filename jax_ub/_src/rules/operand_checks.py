"""Checks of the operands of linear layers."""

from typing import Any

import numpy as np

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.primitives import vma
from jax_ub._src.rules import scaled
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.scaled_array import is_scaled, values_of


def as_tuple(
    label: str, name: str, value: Any, is_tuple: bool, length: int
) -> tuple[Any, ...] | None:
    """Converts an argument with one array per kernel, such as biases, to a tuple.

    None stays None.

    Raises:
        ShapeContractError: unless `value` is one array for one kernel, or a tuple of
            `length` arrays if `is_tuple`.
    """
    if value is None:
        return None
    if isinstance(value, tuple) != is_tuple or (is_tuple and len(value) != length):
        found = "one array" if hasattr(value, "shape") else f"a {type(value).__name__}"
        found += f" of {len(value)}" if isinstance(value, tuple) else ""
        wanted = f"a tuple of {length} kernels" if is_tuple else "one kernel"
        raise ShapeContractError(
            f"{label}: {name} is {found}, but w is {wanted}. Pass one {name} for each "
            "kernel, in the same order."
        )
    return value if is_tuple else (value,)


def check_operands(config: CallConfig, x, ws, biases, residual, out_dtype) -> np.dtype:
    """Checks shapes and dtypes of a layer's operands; returns the result's dtype."""
    label, op, num_ranks = config.label, config.mode.op, config.num_ranks
    if not ws:
        raise ShapeContractError(
            f"{label}: w is an empty tuple. Pass at least one kernel."
        )
    shapes.check_rank(label, "x", values_of(x))
    for i, w in enumerate(ws):
        kernel = config.kernel(values_of(w))
        if is_scaled(x):
            scaled.check_operands(config, x, w)
        else:
            shapes.check_operands(label, x, kernel, takes_f64=config.takes_f64)
        shapes.check_contraction(label, x, kernel, num_ranks, config.mode.sharded)
        *batch, rows, _ = x.shape
        if op == "all_gather_matmul":
            rows *= num_ranks
        if op == "matmul_reduce_scatter":
            shapes.check_divides(label, x, num_ranks)
            rows //= num_ranks
        shapes.check_addends(
            label,
            None if biases is None else biases[i],
            residual,
            (*batch, rows, kernel.shape[1]),
            bias_name=config.bias_name,
            takes_f64=shapes.is_f64(x),
        )
    if op == "matmul_all_reduce":
        bias = None if biases is None else biases[0]
        _check_replicated(config, **{config.bias_name: bias, "residual": residual})
    return shapes.check_out_dtype(label, out_dtype, scaled.result_dtype(x, ws))


def _check_replicated(config, **addends):
    for name, addend in addends.items():
        if addend is not None and vma.axes_of(addend) & frozenset(config.axis_name):
            raise ShapeContractError(
                f"{config.label}: {name} varies over {config.axis_name}, but it is "
                "added once, after the reduction, so it must be the same on every "
                "rank. Pass it replicated: leave the axis out of its in_specs."
            )
