"""Computes FLOPs and predicted times of the calls in the table of `explain`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ub._src.primitives.call import Call
from jax_ub._src.primitives.sizes import global_sizes
from jax_ub._src.tools import simulate
from jax_ub._src.tools.explain.hlo import Pair
from jax_ub._src.tools.simulate.hardware import Hardware
from jax_ub._src.tools.simulate.predict import Prediction


def prediction(
    call: Call, operands: Sequence[Any], method: str, hardware: str | Hardware
) -> Prediction:
    """Predicts the time of a call on `hardware` with the simulator's cost model.

    `operands` have the shapes and dtypes of one rank's operands.
    """
    op, M, K, N = global_sizes(call, operands)
    sizes = {"M": max(M, 1), "K": max(K, 1), "N": max(N, 1)}
    ranks = call.num_ranks if call.axis_name else 1
    dtype = operands[0].dtype
    return simulate.estimate(
        op, method, **sizes, P=ranks, dtype=dtype, hardware=hardware
    )


def flops(call: Call, operands: Sequence[Any]) -> int:
    """Returns a rank's floating-point operations in the GEMMs of a call.

    Reductions of partial sums are not counted.
    """
    if call.communicates_only:
        return 0
    _, M, K, N = global_sizes(call, operands)
    return 2 * M * K * N // (call.num_ranks if call.axis_name else 1)


def pair_flops(pair: Pair) -> int | None:
    """Returns a rank's floating-point operations in XLA's dot, or None if unknown."""
    if pair.sizes is None:
        return None
    M, K, N = pair.sizes
    return 2 * M * K * N // max(pair.num_ranks, 1)


def pair_seconds(pair: Pair, hardware: str | Hardware) -> float | None:
    """Predicts the seconds of XLA's dot and collective, one after the other.

    Returns None if the sizes are unknown, and for f64.
    """
    if pair.sizes is None or pair.itemsize not in (1, 2, 4):
        return None
    # The model only uses the item size of the dtype.
    dtype = np.dtype(("V", pair.itemsize))
    M, K, N = pair.sizes
    return simulate.predict(
        pair.could_be, "xla", M, K, N, pair.num_ranks, dtype, hardware
    )
