"""Fused operations, each replacing consecutive basic operations of a list."""

from jax_ub._src.ops.fused.backward_activation_bias import BackwardActivationBias
from jax_ub._src.ops.fused.backward_add_rmsnorm import BackwardAddRMSNorm
from jax_ub._src.ops.fused.backward_linear_add import BackwardLinearAdd
from jax_ub._src.ops.fused.backward_linear_scale import BackwardLinearScale
from jax_ub._src.ops.fused.forward_linear_bias_activation import (
    ForwardLinearBiasActivation,
)
from jax_ub._src.ops.fused.forward_linear_bias_add import ForwardLinearBiasAdd
from jax_ub._src.ops.fused.forward_linear_scale_add import ForwardLinearScaleAdd
from jax_ub._src.ops.fused.userbuffers_backward_linear import UserbuffersBackwardLinear
from jax_ub._src.ops.fused.userbuffers_forward_linear import UserbuffersForwardLinear

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
