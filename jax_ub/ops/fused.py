"""Fused operations, each replacing consecutive basic operations of a list.

A fused operation is constructed from these basic operations: by keyword, or in forward
order in the tuple `basic_ops`. An operation that does not fit raises
`ShapeContractError`.
"""

from jax_ub._src.ops.fused import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from jax_ub._src.ops.userbuffers import UserbuffersForwardLinear
from jax_ub._src.ops.userbuffers_backward import UserbuffersBackwardLinear

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
]
