"""Fused operations, each replacing consecutive basic operations of a list.

Each module has one class and the function that inserts it.

They are registered below in Transformer Engine's order. An operation that one fusion
has taken is no longer available to later fusions.
"""

from jax_ub._src.ops.fused.backward_activation_bias import (
    BackwardActivationBias as BackwardActivationBias,
)
from jax_ub._src.ops.fused.backward_add_rmsnorm import (
    BackwardAddRMSNorm as BackwardAddRMSNorm,
)
from jax_ub._src.ops.fused.backward_linear_add import (
    BackwardLinearAdd as BackwardLinearAdd,
)
from jax_ub._src.ops.fused.backward_linear_scale import (
    BackwardLinearScale as BackwardLinearScale,
)
from jax_ub._src.ops.fused.forward_linear_bias_activation import (
    ForwardLinearBiasActivation as ForwardLinearBiasActivation,
)
from jax_ub._src.ops.fused.forward_linear_bias_add import (
    ForwardLinearBiasAdd as ForwardLinearBiasAdd,
)
from jax_ub._src.ops.fused.forward_linear_scale_add import (
    ForwardLinearScaleAdd as ForwardLinearScaleAdd,
)
from jax_ub._src.ops.fused.userbuffers_backward_linear import (
    UserbuffersBackwardLinear as UserbuffersBackwardLinear,
)
from jax_ub._src.ops.fused.userbuffers_forward_linear import (
    UserbuffersForwardLinear as UserbuffersForwardLinear,
)
from jax_ub._src.ops.registry import register_backward_fusion, register_forward_fusion

FORWARD = (
    UserbuffersForwardLinear,
    ForwardLinearBiasAdd,
    ForwardLinearBiasActivation,
    ForwardLinearScaleAdd,
)
BACKWARD = (
    UserbuffersBackwardLinear,
    BackwardLinearAdd,
    BackwardLinearScale,
    BackwardActivationBias,
    BackwardAddRMSNorm,
)

for _forward in FORWARD:
    register_forward_fusion(_forward.fuse_forward_ops)
for _backward in BACKWARD:
    register_backward_fusion(_backward.fuse_backward_ops)
