"""What a call costs, by the cost model."""

from collections.abc import Sequence
from typing import Any

from jax_ub import simulate
from jax_ub.primitives.call import Call
from jax_ub.primitives.sizes import global_sizes
from jax_ub.simulate.hardware import Hardware
from jax_ub.simulate.predict import Prediction


def prediction(
    call: Call, operands: Sequence[Any], method: str, hardware: str | Hardware
) -> Prediction:
    """What the model says of a call with these operands on every rank."""
    op, M, K, N = global_sizes(call, operands)
    sizes = {"M": max(M, 1), "K": max(K, 1), "N": max(N, 1)}
    ranks = call.num_ranks if call.axis_name else 1
    dtype = operands[0].dtype
    return simulate.estimate(
        op, method, **sizes, P=ranks, dtype=dtype, hardware=hardware
    )
