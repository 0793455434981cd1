"""Which operations the fusions take, and which they leave alone."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P
from programs import tp_mesh
from sequences import linear, names, overlapped

from jax_ub import ops
from jax_ub._src.ops import fuser as fusions
from jax_ub.ops import fused

FUSED = [getattr(fused, name) for name in fused.__all__]


def forward(*found):
    return names(ops.OperationFuser(found).forward_ops)


def backward(*found):
    return names(ops.OperationFuser(found).backward_ops)


def basic(mode, name="qkv", **options):
    return ops.BasicLinear(
        8, 8, tensor_parallel_mode=mode, **overlapped(name, **options)
    )


UBF, UBB = "UserbuffersForwardLinear", "UserbuffersBackwardLinear"
BIAS = ops.Bias(8)
SCATTER = ops.ReduceScatter()

PATTERNS = [
    ([basic("column")], [UBF], [UBB]),
    ([basic("column"), BIAS], [UBF], [UBB]),
    ([basic("row")], [UBF], [UBB]),
    ([basic("row"), BIAS], [UBF, "Bias"], [UBB, "Bias"]),
    ([basic(None), SCATTER], [UBF], [UBB]),
    ([basic(None), BIAS, SCATTER], [UBF], [UBB]),
    # A column-parallel linear is not fused with a reduce-scatter.
    (
        [basic("column"), BIAS, SCATTER],
        [UBF, "ReduceScatter"],
        [UBB, "ReduceScatter"],
    ),
    # A linear that is not parallel has nothing to overlap.
    ([basic(None)], ["BasicLinear"], ["BasicLinear"]),
    (
        [basic(None), BIAS, ops.GELU(), SCATTER],
        ["ForwardLinearBiasActivation", "ReduceScatter"],
        ["BasicLinear", "BackwardActivationBias", "ReduceScatter"],
    ),
    ([basic("column", None)], ["BasicLinear"], ["BasicLinear"]),
    (
        [basic(None, None), SCATTER],
        ["BasicLinear", "ReduceScatter"],
        ["BasicLinear", "ReduceScatter"],
    ),
    # Two layers between other operations.
    (
        [basic("column"), BIAS, ops.GELU(), basic("row", "proj"), BIAS],
        [UBF, "GELU", UBF, "Bias"],
        [UBB, "GELU", UBB, "Bias"],
    ),
]


@pytest.mark.parametrize(("found", "forward_ops", "backward_ops"), PATTERNS)
def test_userbuffers_patterns_equal_transformer_engines(
    found, forward_ops, backward_ops
):
    assert forward(*found) == forward_ops
    assert backward(*found) == backward_ops


def test_a_linear_with_a_bias_is_overlapped():
    column = linear("column", 8, 8, "qkv")
    row = linear("row", 8, 8, "proj")
    assert forward(column, row) == [UBF, UBF, "Bias"]
    assert backward(column, row) == [UBB, UBB, "Bias"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_rank_is_not_overlapped(num_ranks):
    alone = num_ranks == 1
    found = {}

    def body(x):
        for mode in ("column", "row"):
            found[mode] = forward(basic(mode)), backward(basic(mode))
            several = basic(mode, axis_name=("tp",))
            assert (forward(several), backward(several)) == found[mode]
        found[None] = forward(basic(None), SCATTER), backward(basic(None), SCATTER)
        return x

    mapped = jax.shard_map(body, mesh=tp_mesh(num_ranks), in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, 1.0)
    one = (["BasicLinear"], ["BasicLinear"]) if alone else ([UBF], [UBB])
    assert found["column"] == found["row"] == one
    scattered = (["BasicLinear", "ReduceScatter"],) * 2 if alone else ([UBF], [UBB])
    assert found[None] == scattered


def test_unfused_linears_have_a_reason():
    reasons_of = fused.UserbuffersForwardLinear.unfused_reasons
    assert reasons_of([basic("column", None)]) == {
        0: 'no userbuffers_options={"comm_name": ...}'
    }
    assert reasons_of([ops.GELU(), basic(None), ops.GELU()]) == {
        1: "tensor_parallel_mode=None and no ReduceScatter after it"
    }
    assert reasons_of([basic("row")]) == {}
    assert fused.UserbuffersBackwardLinear.unfused_reasons([basic(None)]) == {
        0: "tensor_parallel_mode=None and no ReduceScatter after it"
    }

    def body(x):
        reasons = reasons_of([basic("row"), basic(None), SCATTER])
        assert reasons == {i: "axis 'tp' has one rank" for i in (0, 1)}
        return x

    mapped = jax.shard_map(body, mesh=tp_mesh(1), in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, 1.0)
    extra = ops.MakeExtraOutput(in_place=True)
    reasons_of = fused.BackwardLinearAdd.unfused_reasons
    assert reasons_of([extra, basic("column", None)]) == {
        1: "column-parallel: dx is reduced first"
    }
    assert reasons_of([ops.MakeExtraOutput(), basic(None)]) == {
        1: "MakeExtraOutput(in_place=False)"
    }
    assert reasons_of([extra, basic("row"), extra, ops.GELU()]) == {}


def test_the_old_name_of_unfused_reasons_is_deprecated():
    class Old(ops.FusedOperation):
        @classmethod
        def refusals(cls, ops):
            return {0: "never"}

    with pytest.warns(DeprecationWarning, match="Rename it to unfused_reasons"):
        assert Old.unfused_reasons([basic("row")]) == {0: "never"}
    assert ops.FusedOperation.unfused_reasons([basic("row")]) == {}


IN_PLACE = ops.AddExtraInput(in_place=True)
FORWARD = [
    ([basic(None, None), BIAS], ["ForwardLinearBiasActivation"]),
    ([basic(None, None), BIAS, ops.SwiGLU()], ["ForwardLinearBiasActivation"]),
    ([basic("column", None), BIAS, ops.ReLU()], ["ForwardLinearBiasActivation"]),
    ([basic(None, None), ops.GELU()], ["BasicLinear", "GELU"]),
    ([basic("row", None), BIAS], ["BasicLinear", "Bias"]),
    ([basic(None, None), BIAS, IN_PLACE], ["ForwardLinearBiasAdd"]),
    ([basic(None, None), IN_PLACE], ["ForwardLinearBiasAdd"]),
    ([basic("column", None), BIAS, IN_PLACE], ["ForwardLinearBiasAdd"]),
    (
        [basic(None, None), BIAS, ops.AddExtraInput()],
        ["ForwardLinearBiasActivation", "AddExtraInput"],
    ),
    ([basic("row", None), IN_PLACE], ["BasicLinear", "AddExtraInput"]),
    # The GEMM+RS adds the residual, which Transformer Engine does not support.
    ([basic("row"), IN_PLACE], ["ForwardLinearBiasAdd"]),
    ([basic("row"), BIAS, IN_PLACE], ["ForwardLinearBiasAdd"]),
    ([basic(None), BIAS, SCATTER, IN_PLACE], ["ForwardLinearBiasAdd"]),
    ([basic("column"), BIAS, IN_PLACE], [UBF, "AddExtraInput"]),
    (
        [basic(None, None), ops.ConstantScale(2.0), IN_PLACE],
        ["ForwardLinearScaleAdd"],
    ),
    (
        [basic("row", None), ops.ConstantScale(2.0), IN_PLACE],
        ["BasicLinear", "ConstantScale", "AddExtraInput"],
    ),
    (
        [basic(None, None), ops.ConstantScale(2.0), ops.AddExtraInput()],
        ["BasicLinear", "ConstantScale", "AddExtraInput"],
    ),
    (
        [basic(None, None), ops.ConstantScale(2.0)],
        ["BasicLinear", "ConstantScale"],
    ),
]


@pytest.mark.parametrize(("found", "expected"), FORWARD)
def test_forward_fusions_match_these_operations(found, expected):
    assert forward(*found) == expected


OUT_IN_PLACE = ops.MakeExtraOutput(in_place=True)
BACKWARD = [
    ([OUT_IN_PLACE, basic(None, None)], ["BackwardLinearAdd"]),
    ([OUT_IN_PLACE, basic("row", None)], ["BackwardLinearAdd"]),
    (
        [OUT_IN_PLACE, basic("column", None)],
        ["MakeExtraOutput", "BasicLinear"],
    ),
    (
        [ops.MakeExtraOutput(), basic(None, None)],
        ["MakeExtraOutput", "BasicLinear"],
    ),
    (
        [OUT_IN_PLACE, ops.GELU(), basic(None, None)],
        ["MakeExtraOutput", "GELU", "BasicLinear"],
    ),
    # The AG+GEMM adds the residual's gradient, which Transformer Engine does not
    # support.
    ([OUT_IN_PLACE, basic("row")], ["BackwardLinearAdd"]),
    ([OUT_IN_PLACE, basic(None), BIAS, SCATTER], ["BackwardLinearAdd"]),
    ([OUT_IN_PLACE, basic("column")], ["MakeExtraOutput", UBB]),
    ([basic(None, None), ops.ConstantScale(2.0)], ["BackwardLinearScale"]),
    ([basic("row", None), ops.ConstantScale(2.0)], ["BackwardLinearScale"]),
    (
        [basic("column", None), ops.ConstantScale(2.0)],
        ["BasicLinear", "ConstantScale"],
    ),
    ([basic("row"), ops.ConstantScale(2.0)], [UBB, "ConstantScale"]),
    (
        [ops.ConstantScale(2.0), basic(None, None)],
        ["ConstantScale", "BasicLinear"],
    ),
    (
        [basic(None, None), BIAS, ops.GELU()],
        ["BasicLinear", "BackwardActivationBias"],
    ),
    ([BIAS, ops.SwiGLU()], ["BackwardActivationBias"]),
    ([ops.GELU(), BIAS], ["GELU", "Bias"]),
    ([ops.MakeExtraOutput(), ops.RMSNorm(8)], ["BackwardAddRMSNorm"]),
    ([OUT_IN_PLACE, ops.RMSNorm(8)], ["MakeExtraOutput", "RMSNorm"]),
    ([ops.MakeExtraOutput(), ops.LayerNorm(8)], ["MakeExtraOutput", "LayerNorm"]),
    # The first fusion that matches a linear fuses it.
    (
        [OUT_IN_PLACE, basic(None, None), ops.ConstantScale(2.0)],
        ["BackwardLinearAdd", "ConstantScale"],
    ),
]


@pytest.mark.parametrize(("found", "expected"), BACKWARD)
def test_backward_fusions_match_these_operations(found, expected):
    assert backward(*found) == expected


def test_fusions_run_in_transformer_engines_order():
    tried = [f.__self__.__name__ for f in fusions.fusions("forward")]
    assert tried == [
        "UserbuffersForwardLinear",
        "ForwardLinearBiasAdd",
        "ForwardLinearBiasActivation",
        "ForwardLinearScaleAdd",
    ]
    tried = [f.__self__.__name__ for f in fusions.fusions("backward")]
    assert tried == [
        "UserbuffersBackwardLinear",
        "BackwardLinearAdd",
        "BackwardLinearScale",
        "BackwardActivationBias",
        "BackwardAddRMSNorm",
    ]


def test_without_fusions_no_operation_is_fused():
    found = [basic("column"), BIAS, ops.GELU()]
    with pytest.raises(KeyError), ops.without_fusions():
        assert forward(*found) == backward(*found) == names(found)
        fusions.register_forward_fusion(list)
        raise KeyError
    try:
        assert forward(*found) == [UBF, "GELU"]
        assert fusions.fusions("forward")[-1] is list
    finally:
        fusions.unregister_fusion(list)
    assert len(fusions.fusions("forward")) == sum(
        "Forward" in fusion.__name__ for fusion in FUSED
    )


def test_a_fusion_that_is_registered_again_without_fusions_runs():
    before = fusions.fusions("forward")
    with ops.without_fusions():
        ops.register_forward_fusion(before[0])
        assert forward(basic("column"), BIAS) == [UBF]
    assert fusions.fusions("forward") == before


def test_without_fusions_restores_fusions_that_are_not_hashable():
    @dataclasses.dataclass
    class Unchanged:
        def __call__(self, found):
            return found

    fusion, before = Unchanged(), fusions.fusions("forward")
    fusions.register_forward_fusion(fusion)
    try:
        with ops.without_fusions():
            pass
        assert fusions.fusions("forward") == (*before, fusion)
    finally:
        fusions.unregister_fusion(fusion)


def test_a_fusion_that_is_unregistered_without_fusions_stays_so():
    before = fusions.fusions("forward")
    fusions.register_forward_fusion(list)
    try:
        with ops.without_fusions(), ops.without_fusions():
            fusions.unregister_fusion(list)
            fusions.register_forward_fusion(tuple)
            fusions.unregister_fusion(tuple)
        assert fusions.fusions("forward") == before
    finally:
        fusions.unregister_fusion(list)


@pytest.mark.parametrize("fusion", FUSED)
def test_every_fusion_accepts_every_list(fusion):
    scan = getattr(fusion, "fuse_forward_ops", None) or fusion.fuse_backward_ops
    assert scan([]) == []
    every = [ops.GELU(), OUT_IN_PLACE, BIAS, IN_PLACE, ops.ConstantScale(1.0)]
    for op in [*every, basic("column"), basic("row"), basic(None), SCATTER]:
        assert [o for f in scan([op]) for o in f.basic_ops] == [op]
    assert fusion.__doc__.count("Transformer Engine")
