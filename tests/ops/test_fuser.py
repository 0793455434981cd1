"""The passes of the fuser, and what they make of a list of operations."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from ops_fusions import (
    PASSES,
    Chain,
    DoubleAdd,
    first_of,
    last_of,
    only,
    windows_of,
)
from ops_on_ranks import TOKENS, integers_of, value_and_gradients
from programs import calls, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.ops import fuser as fusers
from jax_ub._src.ops.fused_operation import FusedOperation
from jax_ub._src.ops.operation import BasicOperation


def names(fused):
    return [type(op).__name__ for op in fused]


def residual_mlp():
    """Returns a tensor-parallel MLP whose residual is passed on by a channel."""
    make = ops.MakeExtraOutput(in_place=True)
    return ops.Sequential(
        make.with_extra_output_channel(0, "residual", output_to_caller=False),
        ops.BasicLinear(8, 16, tensor_parallel_mode="column", sequence_parallel=True),
        ops.ReLU(),
        ops.BasicLinear(16, 8, tensor_parallel_mode="row", sequence_parallel=True),
        ops.Bias(8),
        ops.AddExtraInput(in_place=True).with_extra_input_channel(0, "residual"),
    )


def plain_mlp(params, x):
    y = jax.nn.relu(x @ params[1]["kernel"]) @ params[3]["kernel"]
    return y + params[4]["bias"] + x


def test_fusion_passes_run_in_order():
    seen = []

    def watch(name):
        def fusion(found):
            seen.append((name, names(found)))
            return [Chain(tuple(found[:2])), *found[2:]] if name == "joint" else found

        return fusion

    fuser = ops.OperationFuser([ops.Bias(4), ops.GELU(), ops.ReLU()])
    fusions = {name: [watch(name)] for name in ("joint", "forward", "backward")}
    with only(**fusions):
        forward, backward = fuser.forward_ops, fuser.backward_ops
    assert names(forward) == names(backward) == ["Chain", "ReLU"]
    assert seen == [
        ("joint", ["Bias", "GELU", "ReLU"]),
        ("forward", ["Chain", "ReLU"]),
        ("joint", ["Bias", "GELU", "ReLU"]),
        ("backward", ["Chain", "ReLU"]),
    ]


def test_prepended_fusion_runs_first():
    first, second, third = first_of(1), first_of(2), first_of(3)
    fuser = ops.OperationFuser([ops.Bias(4), ops.GELU(), ops.ReLU()])
    with only(forward=[second]):
        ops.register_forward_fusion(first)
        ops.register_forward_fusion(third, prepend=True)
        ops.register_forward_fusion(third)  # a second time changes nothing
        assert fusers.fusions("forward") == (third, second, first)
    with only():
        ops.register_backward_fusion(second)
        assert names(fuser.backward_ops) == ["Chain", "ReLU"]
        ops.unregister_fusion(second)
        assert names(fuser.backward_ops) == ["Bias", "GELU", "ReLU"]


@pytest.mark.parametrize("name", PASSES)
def test_prepend_is_a_bool(name):
    text = f"register_{name}_fusion: prepend = 'no' is not a bool"
    with pytest.raises(ub.errors.UnknownNameError, match=text):
        getattr(ops, f"register_{name}_fusion")(lambda ops: ops, prepend="no")


@pytest.mark.parametrize("name", PASSES)
def test_a_fusion_that_is_not_callable_is_rejected(name):
    with pytest.raises(ub.errors.FusionError, match=f"register_{name}_fusion.*None"):
        getattr(ops, f"register_{name}_fusion")(None)
    assert None not in fusers.fusions(name)
    with pytest.raises(ub.errors.FusionError, match="^unregister_fusion: fusion = Non"):
        ops.unregister_fusion(None)


def test_result_must_expand_to_the_same_operations():
    fuser = ops.OperationFuser([ops.Bias(4), ops.GELU()])
    for wrong in (lambda ops: ops[:1], lambda ops: ops[::-1], lambda ops: [*ops, *ops]):
        with only(backward=[wrong]):
            message = "the fusion .*<lambda> returned .* but was given .*Bias.*GELU"
            with pytest.raises(ub.errors.FusionError, match=message):
                fuser.backward_ops  # noqa: B018


@pytest.mark.parametrize("result", [None, [1], "ops"])
def test_a_fusion_that_returns_no_list_of_operations_is_rejected(result):
    fuser = ops.OperationFuser([ops.Bias(4), ops.GELU()])
    message = "the fusion .*<lambda> returned .*, which is not a list of basic and"
    with (
        only(forward=[lambda ops: result]),
        pytest.raises(ub.errors.FusionError, match=message),
    ):
        fuser.forward_ops  # noqa: B018


def test_a_fused_operation_that_is_longer_than_the_list_is_rejected():
    fusion = windows_of(lambda found: Chain((*found, ops.ReLU())), ops.GELU)
    with only(forward=[fusion]):
        fuser = ops.OperationFuser([ops.Bias(4), ops.GELU()])
        with pytest.raises(ub.errors.FusionError, match="but was given .*Bias.*GELU"):
            fuser.forward_ops  # noqa: B018


FUSE = [
    (
        3,
        3,
        "ShapeContractError",
        "^fuse_windows: match = 3 is not a function. Pass one",
    ),
    (3, lambda rest: None, "ShapeContractError", "^fuse_windows: ops is of type int."),
    (
        [ops.GELU(), 3],
        lambda rest: None,
        "ShapeContractError",
        "^fuse_windows: entry 1 is",
    ),
    ([ops.GELU()], lambda rest: 3, "FusionError", "^fuse_windows: match returned 3."),
]


@pytest.mark.parametrize(("found", "match", "error", "text"), FUSE)
def test_fuse_windows_rejects_other_arguments(found, match, error, text):
    with pytest.raises(getattr(ub.errors, error), match=text):
        ops.fuse_windows(found, match)


def test_an_unknown_pass_is_rejected():
    text = "direction = 'joint' is not the name of a pass. Pass \"forward\" or"
    with pytest.raises(ub.errors.UnknownNameError, match=text):
        ops.OperationFuser([ops.GELU()]).fused("joint")


@pytest.mark.parametrize("basic_ops", [ops.GELU(), (ops.Linear(4, 4),), [None]])
def test_a_fused_operation_consists_of_basic_operations(basic_ops):
    message = "Chain: basic_ops = .* is not a tuple of basic operations"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        Chain(basic_ops)
    assert hash(Chain([ops.GELU()])) == hash(Chain((ops.GELU(),)))


def test_a_producer_and_its_reader_may_not_be_fused():
    fuser = ops.OperationFuser(residual_mlp())
    with only(forward=[first_of(6)]):
        message = r"a channel; the producer is operation 0 \(MakeEx"
        with pytest.raises(ub.errors.FusionError, match=message):
            fuser.forward_ops  # noqa: B018


@pytest.mark.parametrize(
    "forward, backward",
    [
        ([first_of(3)], []),
        ([], [first_of(3)]),
        ([first_of(2), last_of(3)], [last_of(4)]),
        ([windows_of(DoubleAdd, ops.Bias, ops.AddExtraInput)], [first_of(2)]),
        # The group contains both the producer and the consumer of the channel.
        ([first_of(4)], [last_of(5)]),
    ],
    ids=["forward", "backward", "overlapping", "added at once", "channel inside"],
)
def test_any_fusion_computes_the_same_result(forward, backward):
    seq = residual_mlp()
    params = integers_of(seq)
    x, weights = small_integers(7, (8, 8)), small_integers(8, (8, 8))
    mesh, specs = tp_mesh(2), (seq.specs(), TOKENS)
    with only(forward=forward, backward=backward):
        every = [
            value_and_gradients(
                on_ranks(seq, mesh, specs, TOKENS, check_vma=check_vma), weights
            )
            for check_vma in (True, False)
        ]
        found = jax.jit(lambda *v: [step(*v) for step in every])(params, x)
    expected = value_and_gradients(plain_mlp, weights)(params, x)
    for actual in found:
        assert_equal(actual, expected)


def test_types_inside_a_group_equal_those_of_its_operations():
    """In the group, the sum over ranks is replicated, and later arrays vary."""
    row = ops.BasicLinear(8, 4, tensor_parallel_mode="row", dtype=jnp.bfloat16)
    seq = ops.Sequential(ops.ConstantScale(2.0), row, ops.AddExtraInput(), ops.ReLU())
    params = integers_of(seq)
    x, extra = small_integers(7, (8, 8)), small_integers(8, (2, 8, 4), jnp.bfloat16)
    weights = small_integers(9, (2, 8, 4))
    ranks = P("tp")

    def run(params, x, extra):
        return seq(params, x, extra[0])[None]

    def plain(params, x, extra):
        y = (2 * x) @ params[1]["kernel"]
        return jax.nn.relu(y + extra)

    specs = (seq.specs(), P(None, "tp"), ranks)
    for fusions in ({"forward": [first_of(4)]}, {"backward": [first_of(4)]}):
        with only(**fusions):
            step = value_and_gradients(on_ranks(run, tp_mesh(2), specs, ranks), weights)
            y, gradients = step(params, x, extra)
        expected, wanted = value_and_gradients(plain, weights)(params, x, extra)
        assert_equal(y, expected.astype(jnp.bfloat16))
        assert_equal(gradients, wanted)


@dataclasses.dataclass(frozen=True, repr=False)
class Counted(BasicOperation):
    """Multiplies x by a factor, and records which gradients it computes."""

    seen: list = dataclasses.field(hash=False, compare=False)
    token: int  # another one every time, as JAX traces equal descriptions once

    def init(self, key):
        return {"factor": jnp.full((), 3.0), "unused": jnp.zeros(5)}

    def specs(self):
        return {"factor": P(), "unused": P()}

    def saved(self, needs):
        names = {"x"} if "factor" in needs.params else set()
        return frozenset(names | ({"factor"} if needs.x else set()))

    def forward(self, params, x, extra_inputs, saves):
        self.seen.append(("forward", sorted(saves)))
        return x * params["factor"], (), {"x": x, "factor": params["factor"]}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        self.seen.append(
            ("backward", sorted(residuals), needs.x, *sorted(needs.params))
        )
        dx = dy * residuals["factor"] if needs.x else None
        d_params = {}
        if "factor" in needs.params:
            d_params["factor"] = jnp.sum(dy * residuals["x"])
        return dx, d_params, ()


def test_only_requested_gradients_are_saved_and_computed():
    x, tokens = jnp.arange(4.0), itertools.count()

    def seen_by(argnums, seq_of=lambda op: ops.Sequential(op)):
        seen = []
        seq = seq_of(Counted(seen, next(tokens)))
        params = seq.init(jax.random.key(0))
        jax.grad(lambda *v: jnp.sum(seq(*v)), argnums)(params, x)
        return seen

    of_x, of_params = seen_by(1), seen_by(0)
    assert ("forward", ["factor"]) in of_x
    assert of_x[-1] == ("backward", ["factor"], True)
    assert ("forward", ["x"]) in of_params
    assert of_params[-1] == ("backward", ["x"], False, "factor", "unused")
    with only(backward=[first_of(2)]):
        two = seen_by(1, lambda op: ops.Sequential(op, ops.ReLU()))
    assert two[-1] == ("backward", ["factor"], True)
    seen = []
    seq = ops.Sequential(Counted(seen, next(tokens)))
    seq(seq.init(jax.random.key(0)), x)
    assert seen == [("forward", [])]


def test_operations_before_the_first_gradient_have_no_backward():
    seq = ops.Sequential(*(ops.BasicLinear(8, 8) for _ in range(4)))
    params, x = seq.init(jax.random.key(0)), small_integers(0, (4, 8))

    def counted(fusions):
        def loss(last):
            return jnp.sum(seq((*params[:3], last), x) ** 2)

        with only(**fusions):
            text = compiled_text(jax.jit(jax.grad(loss)), params[3])
        return calls(text)

    # The program has four forward GEMMs, and the gradient of the last kernel.
    assert counted({}) == {"matmul": 4, "wgrad": 1}
    assert counted({"backward": [first_of(4)]}) == {"matmul": 4, "wgrad": 1}


def test_a_zero_gradient_does_not_change_main_grad():
    linear = ops.BasicLinear(4, 4, accumulate_into_main_grad=True)
    seq = ops.Sequential(ops.MakeExtraOutput(), linear)
    params = integers_of(seq)
    x = small_integers(1, (4, 4))
    for fusions in ({}, {"backward": [first_of(2)]}):
        with only(**fusions):
            gradient = jax.grad(lambda p: jnp.sum(seq(p, x)[0] * 0))(params)
        assert_equal(gradient[1]["main_grad"], params[1]["main_grad"])
    # The GEMM is also left out in a group with another operation that has a gradient.
    bias = ops.Sequential(ops.Bias(4), ops.MakeExtraOutput(), linear)
    params = integers_of(bias)
    with only(backward=[first_of(3)]):
        step = jax.jit(jax.grad(lambda p: jnp.sum(bias(p, x)[1])))
        gradient = step(params)
        assert not calls(compiled_text(step, params))["wgrad"]
    assert_equal(gradient[0]["bias"], jnp.full(4, 4.0))
    assert_equal(gradient[2]["main_grad"], params[2]["main_grad"])


@dataclasses.dataclass(frozen=True)
class Lazy(FusedOperation):
    """An operation whose backward returns fewer gradients than requested."""

    def backward(self, residuals, dy, d_extra_outputs, needs):
        return None, ({},) * len(self.basic_ops), ((),) * len(self.basic_ops)


def test_missing_gradients_are_zeros():
    seq = ops.Sequential(ops.Bias(4), ops.ReLU())
    params, x = seq.init(jax.random.key(0)), small_integers(0, (3, 4))
    with only(backward=[lambda found: [Lazy(tuple(found))]]):
        gradients = jax.grad(lambda *v: jnp.sum(seq(*v)), (0, 1))(params, x)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_one_rule_for_each_group():
    seq = ops.Sequential(ops.Bias(4), ops.ReLU(), ops.Identity(), ops.SiLU())
    params, x = seq.init(jax.random.key(0)), small_integers(0, (3, 4))

    def rules():
        return str(jax.make_jaxpr(lambda p: seq(p, x))(params)).count("custom_vjp_call")

    with only():
        assert rules() == 4
    with only(forward=[first_of(2)]):
        assert rules() == 3
    with only(forward=[first_of(2)], backward=[last_of(3)]):
        assert rules() == 1
    with only(joint=[first_of(4)]):
        assert rules() == 1


def test_errors_name_the_operation():
    seq = ops.Sequential(ops.ReLU(), ops.Linear(4, 4), ops.Bias(5))
    params, x = seq.init(jax.random.key(0)), jnp.ones((2, 4))
    error = ub.errors.ShapeContractError
    with pytest.raises(error, match=r"^operation 3 \(Bias\): Bias: bias has shape"):
        seq(params, x)
    with (
        only(forward=[last_of(2)]),
        pytest.raises(error, match=r"^operation 2 .Bias, B"),
    ):
        seq(params, x)
    with pytest.raises(error, match="type tuple with 2 entries, but there are 3"):
        ops.OperationFuser(seq)(params[:2], x)
    with pytest.raises(error, match=r"operation 1 \(BasicLinear\): params has \[\]"):
        seq(({}, {"bias": jnp.zeros(4)}, {}), x)
    with pytest.raises(error, match=r"operation 2 \(Bias\): params has \[\], but"):
        seq(({}, {"kernel": jnp.zeros((4, 4))}, {}), x)
    with pytest.raises(error, match="1 extra inputs, but the operations take 0: none"):
        seq(params, x, x)
    with pytest.raises(error, match=r"take 1: operation 0 \(AddExtraInput\)"):
        ops.Sequential(ops.AddExtraInput())(({},), x)
    with pytest.raises(
        error,
        match="OperationFuser: entry 1 is of type builtin_function_or_method, not",
    ):
        ops.OperationFuser([ops.ReLU(), len])
    with pytest.raises(error, match=r"OperationFuser: ops is of type int\. Pass"):
        ops.OperationFuser(3)
