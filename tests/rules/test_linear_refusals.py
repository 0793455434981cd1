"""Bad input to `ub.linear`: its errors name it, what it is, and its own arguments."""

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P
from programs import tp_mesh
from refusals import refuses, trace, zeros

import jax_ub as ub
from jax_ub.errors import ShapeContractError, UnknownNameError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"parallel": "row"},
            r"linear \(parallel = 'row'\): matmul_reduce_scatter: x \(8, 6\) has K = 6",
        ),
        (
            {"parallel": "column", "main_grad": zeros(7, 8, dtype="bfloat16")},
            r"linear \(parallel = 'column'\): all_gather_matmul: .* has K = 6",
        ),
        ({"parallel": "column", "sequence_parallel": False}, r"linear: x \(8, 6\)"),
        ({"parallel": None, "axis_name": None}, r"linear: x \(8, 6\) has K = 6"),
    ],
)
def test_a_linear_layer_names_what_was_called(options, message):
    def call(x, w):
        return ub.linear(x, w, **{"axis_name": "tp", **options})

    refuses(ShapeContractError, message, call, zeros(8, 6), zeros(7, 8))


def test_an_axis_that_is_not_used_has_a_name():
    text = "linear: axis_name = 3 is not the name of a mesh axis"
    with pytest.raises(ShapeContractError, match=text):
        ub.linear(zeros(8, 6), zeros(6, 8), axis_name=3)
    assert ub.linear(zeros(8, 6), zeros(6, 8), axis_name="tp").shape == (8, 8)


LAYERS = (
    {"parallel": None, "axis_name": None},
    {"parallel": "column"},
    {"parallel": "column", "sequence_parallel": False},
    {"parallel": "row"},
    {"parallel": "row", "sequence_parallel": False},
)


@pytest.mark.parametrize(
    "found",
    [zeros(6), zeros(8, dtype="int8"), (1,), 1.0],
    ids=["size", "dtype", "tuple", "float"],
)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_the_bias_of_a_linear_layer_is_called_b(options, found):
    def call(x, w):
        return ub.linear(x, w, found, **{"axis_name": "tp", **options})

    with pytest.raises(ShapeContractError, match="^linear.*: b (is|has shape)") as info:
        trace(call, zeros(8, 6), zeros(6, 8))
    assert "bias" not in str(info.value)


def test_a_bias_of_a_linear_layer_that_varies_is_called_b():
    def call(x, w, b):
        options = {"parallel": "row", "axis_name": "tp", "sequence_parallel": False}
        return ub.linear(x, w, b, **options)

    specs = (P(None, "tp"), P("tp"), P("tp"))
    mapped = jax.shard_map(call, mesh=tp_mesh(4), in_specs=specs, out_specs=P())
    message = "matmul_all_reduce: b varies over .*'tp'.*, but it is added once"
    with pytest.raises(ShapeContractError, match=message):
        jax.jit(mapped).trace(zeros(8, 24), zeros(24, 8), zeros(32))


def test_a_linear_layer_has_one_name_wherever_it_fails():
    label = "linear (parallel = 'row'): matmul_reduce_scatter (ub_name 'proj')"

    def call(x, w):
        return ub.linear(x, w, parallel="row", axis_name="tp", ub_name="proj")

    specs = (P(None, "tp"), P("tp"))
    mapped = jax.shard_map(call, mesh=tp_mesh(4), in_specs=specs, out_specs=P("tp"))
    traced = jax.jit(mapped).trace(zeros(8, 24), zeros(24, 8))
    assert label in traced.lower().as_text()
    traced.lower(lowering_platforms=("rocm",))
    assert ub.fallbacks()[-1].label == label
    with pytest.raises(ShapeContractError, match=re.escape(label)):
        jax.jit(mapped).trace(zeros(8, 24), zeros(16, 8))


def test_sequence_parallel_is_true_or_false():
    def call(x, w):
        return ub.linear(
            x, w, parallel="column", axis_name="tp", sequence_parallel="yes"
        )

    message = "linear: sequence_parallel = 'yes' is not a bool. Pass True or False"
    refuses(UnknownNameError, message, call, zeros(8, 6), zeros(6, 8))


@pytest.mark.parametrize("flag", ["return_gathered", "rhs_transposed"])
def test_flags_of_a_gather_are_true_or_false(flag):
    def call(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", **{flag: "yes"})

    message = f"all_gather_matmul: {flag} = 'yes' is not a bool. Pass True or False"
    refuses(UnknownNameError, message, call, zeros(8, 6), zeros(6, 8))


def test_main_grad_that_is_no_array():
    refuses(
        ShapeContractError,
        "linear: main_grad is of type bool, but the op takes an array",
        lambda x, w: ub.linear(x, w, main_grad=True),
        zeros(8, 6),
        zeros(6, 8),
    )


@pytest.mark.parametrize("name", ["x", "w"])
def test_a_list_in_itself_is_no_array(name):
    """Such a list is no pytree: JAX's recursion over it never ends."""
    found: list = []
    found.append(found)
    message = f"linear: {name} is of type list, but the op takes an array"

    def call(x, w):
        return ub.linear(**{"x": x, "w": w, name: found})

    refuses(ShapeContractError, message, call, zeros(8, 6), zeros(6, 8))
