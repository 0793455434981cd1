"""What a call costs: its bytes, and its time by the cost model."""

import math
from collections.abc import Sequence
from typing import Any

from jax_ub import simulate
from jax_ub.primitives.call import Call
from jax_ub.simulate.hardware import Hardware
from jax_ub.simulate.predict import Prediction

_TARGET = "jax_ub$"


def op_of(call: Call) -> str:
    """The name of a call's target, as the simulator knows it."""
    return call.target.removeprefix(_TARGET)


def prediction(
    call: Call, operands: Sequence[Any], method: str, hardware: str | Hardware
) -> Prediction:
    """What the model says of a call with these operands on every rank."""
    op, M, K, N = _global_sizes(call, operands)
    sizes = {"M": max(M, 1), "K": max(K, 1), "N": max(N, 1)}
    ranks = call.num_ranks if call.axis_name else 1
    dtype = operands[0].dtype
    return simulate.estimate(
        op, method, **sizes, P=ranks, dtype=dtype, hardware=hardware
    )


def _global_sizes(call, operands):
    """The op, and M, K, N over all ranks."""
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
    rows, width = call.communicated(*operands)
    if op == "all_gather_matmul":
        kernels = shapes[1 : 1 + call.num_kernels]
        return op, rows, width, P * _out(call, kernels)
    if op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        return op, rows, P * _features(shapes[: call.num_pairs]), width
    return op, rows, width, P * _beside(call, op, shapes, width)


def _beside(call, op, shapes, width):
    """Output features of a local product beside `width` features of communication."""
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
