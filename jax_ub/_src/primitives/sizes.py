"""Returns the global sizes M, K, N of calls, and their keys in tuned tables."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ub._src.config.tuned_file import TunedKey

_TARGET = "jax_ub$"


def op_of(call: Any) -> str:
    """Returns an op's name, such as "matmul": the FFI target without its prefix."""
    return call.target.removeprefix(_TARGET)


def global_sizes(call: Any, operands: Sequence[Any]) -> tuple[str, int, int, int]:
    """Returns a call's op name, and the GEMM sizes M, K and N over all ranks.

    A wgrad without communication counts as a "matmul" that contracts over the rows.
    """
    op, P = op_of(call), call.num_ranks
    shapes = [operand.shape for operand in operands]
    if op == "wgrad" and call.gather is None:
        rows, features = _matrix(shapes[0])
        return "matmul", features, rows, _features(shapes[1 : 1 + call.num_outputs])
    if op == "matmul":
        rows, _ = _matrix(shapes[0])
        return (
            op,
            rows,
            _features(shapes[: call.num_pairs]),
            _out(call, shapes[call.num_pairs : call.num_pairs + 1]),
        )
    communicated: tuple[int, ...] = (1, *call.communicated(*operands))
    rows, width = _matrix(communicated)
    if op == "all_gather_matmul":
        kernels = shapes[1 : 1 + call.num_kernels]
        return op, rows, width, P * _out(call, kernels)
    if op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        return op, rows, P * _features(shapes[: call.num_pairs]), width
    return op, rows, width, P * _beside(call, op, shapes, width)


def tuned_key(call: Any, operands: Sequence[Any]) -> TunedKey | None:
    """Returns a call's key in the table of tuned methods, or None if it has none.

    A tuned cuBLASLt algorithm is an index into the list that cuBLASLt proposes for one
    GEMM, which depends on operand layouts, dtypes and addends. So a local GEMM has a
    key only if it matches one of the GEMMs that the tuner runs in all of these.
    """
    op, M, K, N = global_sizes(call, operands)
    if not call.axis_name:
        own = _own_product(call, operands)
        if own is None:
            return None
        op = own
    return TunedKey(op, call.num_ranks, M, K, N, str(operands[0].dtype))


def _own_product(call, operands):
    dtype = operands[0].dtype
    if op_of(call) == "wgrad":
        if call.num_outputs > 1:
            return None
        if call.accumulate:
            wide = operands[-1].dtype == call.out_dtype == np.float32
            return "wgrad_accumulate" if wide else None
        return "wgrad" if call.out_dtype == dtype else None
    if op_of(call) != "matmul" or call.num_pairs > 1 or call.has_bias:
        return None
    if call.out_dtype != dtype:
        return None
    if not call.has_residual:
        return "dgrad" if call.rhs_transposed else "matmul"
    in_place = call.rhs_transposed and operands[-1].dtype == dtype
    return "dgrad_add" if in_place else None


def _beside(call, op, shapes, width):
    """Returns the total output features of the GEMM that a collective overlaps.

    For bulk ops and wgrad the GEMM's output features are not the communicated ones. An
    op without a GEMM has `width` features.
    """
    if op == "bulk_all_gather":
        return _features(shapes[: call.num_pairs])
    if op == "bulk_reduce_scatter":
        return _features(shapes[1 : 1 + call.num_outputs])
    if op == "wgrad":
        kept = shapes[1 : 1 + call.num_outputs] if call.gather == "x" else shapes[:1]
        return _features(kept)
    return width


def _matrix(shape):
    return math.prod(shape[:-1]), shape[-1]


def _features(shapes):
    return sum(shape[-1] for shape in shapes)


def _out(call, kernels):
    return sum(shape[0 if call.rhs_transposed else 1] for shape in kernels)
