"""Operations that fuse when called together, with the API of TE's `te.ops`.

TE is Transformer Engine.
"""

from jax_ub._src.ops.basic.activation import GEGLU, GELU, ReLU, SiLU, SwiGLU
from jax_ub._src.ops.basic.add_extra_input import AddExtraInput
from jax_ub._src.ops.basic.all_gather import AllGather
from jax_ub._src.ops.basic.all_reduce import AllReduce
from jax_ub._src.ops.basic.basic_linear import BasicLinear
from jax_ub._src.ops.basic.bias import Bias
from jax_ub._src.ops.basic.constant_scale import ConstantScale
from jax_ub._src.ops.basic.dropout import Dropout
from jax_ub._src.ops.basic.identity import Identity
from jax_ub._src.ops.basic.make_extra_output import MakeExtraOutput
from jax_ub._src.ops.basic.normalization import LayerNorm, RMSNorm
from jax_ub._src.ops.basic.quantize import Quantize
from jax_ub._src.ops.basic.reduce_scatter import ReduceScatter
from jax_ub._src.ops.basic.reshape import Reshape
from jax_ub._src.ops.fuser import OperationFuser
from jax_ub._src.ops.linear import Linear
from jax_ub._src.ops.main_grads import (
    gradients_of_main_grads,
    merge_main_grads,
    split_main_grads,
)
from jax_ub._src.ops.operation import BasicOperation, FusedOperation, fuse_windows
from jax_ub._src.ops.registry import (
    register_backward_fusion,
    register_forward_fusion,
    register_joint_fusion,
    unregister_fusion,
    without_fusions,
)
from jax_ub._src.ops.sequential import Sequential
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
    "merge_main_grads",
    "register_backward_fusion",
    "register_forward_fusion",
    "register_joint_fusion",
    "split_main_grads",
    "unregister_fusion",
    "without_fusions",
]
