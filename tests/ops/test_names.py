"""The names of operations that code outside the project relies on."""

import dataclasses

import jax
import pytest

from jax_ub import ops
from jax_ub._src.ops.fused_operation import FusedOperation
from jax_ub._src.ops.operation import Operation

PINNED = [
    "BasicLinear",
    "Bias",
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "MakeExtraOutput",
    "AddExtraInput",
    "Identity",
    "Reshape",
    "ConstantScale",
    "Dropout",
    "GELU",
    "ReLU",
    "SiLU",
    "SwiGLU",
    "GEGLU",
    "LayerNorm",
    "RMSNorm",
    "Quantize",
    "Linear",
]
FUSED = {
    "fuse_forward_ops": "UserbuffersForwardLinear ForwardLinearBiasActivation "
    "ForwardLinearBiasAdd ForwardLinearScaleAdd",
    "fuse_backward_ops": "UserbuffersBackwardLinear BackwardLinearAdd "
    "BackwardLinearScale BackwardActivationBias BackwardAddRMSNorm",
}


@pytest.mark.parametrize("name", PINNED)
def test_operations_are_immutable_and_documented(name):
    kind = getattr(ops, name)
    assert issubclass(kind, Operation)
    assert kind.__dataclass_params__.frozen
    assert "Transformer Engine" in kind.__doc__
    sizes = {"BasicLinear": (4, 4), "Linear": (4, 4), "Reshape": ((4,),)}
    sizes |= dict.fromkeys(("Bias", "LayerNorm", "RMSNorm"), (4,))
    num_sizes = sum(
        field.default is dataclasses.MISSING
        for field in dataclasses.fields(kind)
        if field.init and field.default_factory is dataclasses.MISSING
    )
    op = kind(*sizes.get(name, (0,) * num_sizes))
    assert hash(op) == hash(dataclasses.replace(op))
    assert jax.tree.structure(
        jax.eval_shape(op.init, jax.random.key(0))
    ) == jax.tree.structure(op.specs())


@pytest.mark.parametrize("scan", FUSED)
def test_fused_operations_have_a_fusion_function(scan):
    for name in FUSED[scan].split():
        kind = getattr(ops.fused, name)
        assert issubclass(kind, FusedOperation)
        untouched = [ops.Identity(), ops.Dropout(0.5)]
        assert getattr(kind, scan)(untouched) == untouched
