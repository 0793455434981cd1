"""Operations that fuse when called together, with the API of TE's `te.ops`.

TE is Transformer Engine.
"""

from jax_ub.ops import fused as fused
from jax_ub.ops.basic.activation import GEGLU as GEGLU
from jax_ub.ops.basic.activation import GELU as GELU
from jax_ub.ops.basic.activation import ReLU as ReLU
from jax_ub.ops.basic.activation import SiLU as SiLU
from jax_ub.ops.basic.activation import SwiGLU as SwiGLU
from jax_ub.ops.basic.add_extra_input import AddExtraInput as AddExtraInput
from jax_ub.ops.basic.all_gather import AllGather as AllGather
from jax_ub.ops.basic.all_reduce import AllReduce as AllReduce
from jax_ub.ops.basic.basic_linear import BasicLinear as BasicLinear
from jax_ub.ops.basic.bias import Bias as Bias
from jax_ub.ops.basic.constant_scale import ConstantScale as ConstantScale
from jax_ub.ops.basic.dropout import Dropout as Dropout
from jax_ub.ops.basic.identity import Identity as Identity
from jax_ub.ops.basic.make_extra_output import MakeExtraOutput as MakeExtraOutput
from jax_ub.ops.basic.normalization import LayerNorm as LayerNorm
from jax_ub.ops.basic.normalization import RMSNorm as RMSNorm
from jax_ub.ops.basic.quantize import Quantize as Quantize
from jax_ub.ops.basic.reduce_scatter import ReduceScatter as ReduceScatter
from jax_ub.ops.basic.reshape import Reshape as Reshape
from jax_ub.ops.fuser import OperationFuser as OperationFuser
from jax_ub.ops.linear import Linear as Linear
from jax_ub.ops.main_grads import gradients_of_main_grads as gradients_of_main_grads
from jax_ub.ops.main_grads import merge_main_grads as merge_main_grads
from jax_ub.ops.main_grads import split_main_grads as split_main_grads
from jax_ub.ops.operation import BasicOperation as BasicOperation
from jax_ub.ops.operation import FusedOperation as FusedOperation
from jax_ub.ops.registry import register_backward_fusion as register_backward_fusion
from jax_ub.ops.registry import register_forward_fusion as register_forward_fusion
from jax_ub.ops.registry import register_joint_fusion as register_joint_fusion
from jax_ub.ops.registry import unregister_fusion as unregister_fusion
from jax_ub.ops.registry import without_fusions as without_fusions
from jax_ub.ops.sequential import Sequential as Sequential
