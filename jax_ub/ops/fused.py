"""Fused operations, each replacing consecutive basic operations of a list."""

from jax_ub._src.ops.fused_backward import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
)
from jax_ub._src.ops.fused_forward import (
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
