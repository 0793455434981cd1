"""Operations that are fused when they are called together.

Transformer Engine: `te.ops`.

Activations have shape `[..., tokens, features]` and dtype f32, bf16 or f16. A result
has the dtype of the input, unless the operation has an attribute `dtype`.

Each constructor raises `ShapeContractError` for an argument of the wrong type or value,
`UnknownNameError` for an unknown method, mode or flag, and `UnknownArgumentError` for
an unknown keyword. A call raises `ShapeContractError` if an input or a parameter has
the wrong shape or dtype, and `UnsupportedOverlapError` if a named method cannot run.
"""

from jax_ub._src.ops.basic import (
    AddExtraInput,
    AllGather,
    AllReduce,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    ReduceScatter,
    Reshape,
)
from jax_ub._src.ops.fused_operation import FusedOperation, fuse_windows
from jax_ub._src.ops.fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_fusion,
    register_joint_fusion,
    unregister_fusion,
    without_fusions,
)
from jax_ub._src.ops.linear import BasicLinear, Linear
from jax_ub._src.ops.nonlinear import (
    GEGLU,
    GELU,
    LayerNorm,
    ReLU,
    RMSNorm,
    SiLU,
    SwiGLU,
)
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.ops.quantize import Quantize
from jax_ub._src.ops.sequential import (
    Sequential,
    gradients_of_main_grads,
    merge_fp8_states,
    merge_main_grads,
    split_fp8_states,
    split_main_grads,
)
from jax_ub.ops import fused

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "GEGLU",
    "GELU",
    "Identity",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "fuse_windows",
    "fused",
    "gradients_of_main_grads",
    "merge_fp8_states",
    "merge_main_grads",
    "register_backward_fusion",
    "register_forward_fusion",
    "register_joint_fusion",
    "split_fp8_states",
    "split_main_grads",
    "unregister_fusion",
    "without_fusions",
]
