import contextlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from covering import nightly
from flax_models import assert_trees_close, constant_init, mesh_of, random_variables
from operands import normal
from programs import calls, collectives, compiled_text

import jax_ub as ub
from jax_ub.flax.linen import Overlap

RULES = {
    r".*\.(query|key|value)": "column",
    r".*\.out": "row",
    r".*\.up": "column",
    r".*\.down": "rs",
}


class Block(nn.Module):
    """Attention and an MLP of layers of Flax."""

    @nn.compact
    def __call__(self, x, _=None):
        init = {"kernel_init": constant_init}
        x = x + nn.MultiHeadAttention(4, name="attention", **init)(x)
        y = jnp.sin(nn.Dense(32, name="up", **init)(x))
        return x + nn.Dense(16, name="down", **init)(y), None


class Model(nn.Module):
    """Two blocks under `nn.scan` and `nn.remat`, and a head that no rule matches."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        head = nn.Dense(3, name="head", kernel_init=constant_init)
        return head(scan(name="blocks")(x, None)[0])


@pytest.mark.parametrize("types", ["explicit", *nightly("auto")])
def test_layers_of_an_unmodified_model_are_overlapped(types):
    model, x = Model(), normal(0, (4, 8, 16))
    variables = random_variables(model, x)
    initial = jax.jit(model.init)(jax.random.key(0), x)

    def loss(variables, x):
        return jnp.sum(jnp.sin(model.apply(variables, x)))

    expected = jax.jit(jax.value_and_grad(loss))(variables, x)
    overlap = Overlap(RULES)
    with jax.set_mesh(mesh_of(2, 2, types)), nn.intercept_methods(overlap):
        x = jax.device_put(x, jax.P("dp", "tp"))
        text = compiled_text(jax.jit(model.apply), variables, x)
        actual = jax.jit(jax.value_and_grad(loss))(variables, x)
        assert_trees_close(jax.jit(model.init)(jax.random.key(0), x), initial)
    assert calls(text) == {"all_gather_matmul": 4, "matmul_reduce_scatter": 2}
    columns = ("attention.query", "attention.key", "attention.value", "up")
    assert overlap.overlapped == {
        **{f"blocks.{name}": "column" for name in columns},
        "blocks.attention.out": "row",
        "blocks.down": "row",
    }
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_outside_of_the_block_a_bound_layer_is_unchanged():
    x = normal(0, (4, 8, 16))
    layer = nn.Dense(32)
    bound = layer.bind(layer.init(jax.random.key(0), x))
    with jax.set_mesh(mesh_of(1, 2)), nn.intercept_methods(Overlap({"": "column"})):
        y = bound(x)
    assert bound.dot_general is None
    assert_trees_close(y, bound(x))


def test_the_first_rule_that_matches_counts():
    x = normal(0, (4, 8, 16))
    overlap = Overlap({r"blocks\.up": None, **RULES}, sequence_parallel=False)
    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with jax.set_mesh(mesh_of(1, 2)), nn.intercept_methods(overlap):
        text = compiled_text(jax.jit(model.apply), variables, x)
    assert calls(text)["matmul_all_reduce"] == 2
    assert "blocks.up" not in overlap.overlapped


class One(nn.Module):
    """A layer of each kind that can be overlapped, named "layer"."""

    kind: str

    @nn.compact
    def __call__(self, x):
        if self.kind == "attend":
            return nn.Embed(16, 16, name="layer").attend(x)
        layers = {
            "dense": lambda name: nn.Dense(16, name=name),
            "general": lambda name: nn.DenseGeneral(16, name=name),
            "einsum": lambda name: nn.Einsum((16, 16), "...k,kn->...n", name=name),
        }
        return layers[self.kind]("layer")(x)


@pytest.mark.parametrize("kind", ["dense", "general", "einsum", "attend"])
def test_the_innermost_block_with_a_rule_for_a_layer_overlaps_it(kind):
    model, x = One(kind), normal(0, (4, 8, 16))
    variables = random_variables(model, x)
    path = "layer.attend" if kind == "attend" else "layer"

    def kinds(*rules):
        blocks = [Overlap(each) for each in rules]
        with jax.set_mesh(mesh_of(2, 2, "auto")), contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            y = jax.jit(model.apply)(variables, x)
        assert_trees_close(y, model.apply(variables, x))
        return [block.overlapped for block in blocks]

    column, row, none, other = ({path: "column"}, {path: "row"}, {path: None}, {})
    assert kinds(column, row) == [{}, row]
    assert kinds(row, column, other) == [{}, column, {}]
    assert kinds(column, none) == [{}, {}]
    assert kinds(none, column) == [{}, column]


def test_kernels_may_be_sharded_over_a_data_axis():
    layer, x = nn.Dense(32), normal(0, (4, 8, 16))
    kernel = layer.init(jax.random.key(0), x)["params"]["kernel"]

    def loss(kernel, x):
        params = {"kernel": kernel, "bias": jnp.zeros(32)}
        return jnp.sum(jnp.sin(layer.apply({"params": params}, x)))

    expected = jax.jit(jax.grad(loss))(kernel, x)
    overlap = Overlap({"": "column"}, fsdp_axes="dp")
    with jax.set_mesh(mesh_of(2, 2)), nn.intercept_methods(overlap):
        on_mesh = jax.device_put(kernel, jax.P("dp", "tp"))
        text = compiled_text(jax.jit(jax.grad(loss)), on_mesh, x)
        gradient = jax.jit(jax.grad(loss))(on_mesh, x)
    assert gradient.sharding.spec == jax.P("dp", "tp")
    assert collectives(text)["reduce-scatter"] == 1
    assert_trees_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_with_a_custom_dot_general_is_rejected():
    def rounded(lhs, rhs, dimension_numbers, **options):
        return jax.lax.dot_general(jnp.round(lhs), rhs, dimension_numbers, **options)

    x = normal(0, (4, 8, 16))
    text = (
        "overlap: the layer '' has a custom dot_general, <function .*. "
        "Exclude the layer: {'': None, ...}."
    )
    for own in ({"dot_general": rounded}, {"dot_general_cls": lambda: rounded}):
        layer = nn.Dense(32, **own)
        variables = random_variables(layer, x)
        with (
            nn.intercept_methods(Overlap({"": "column"})),
            pytest.raises(ub.errors.UnsupportedOverlapError, match=text),
        ):
            layer.apply(variables, x)


@pytest.mark.parametrize(
    ("rules", "options", "error", "text"),
    [
        (
            {"up(": "column"},
            {},
            "UnknownNameError",
            "'up(' is not a regular expression",
        ),
        ({"up": "col"}, {}, "UnknownNameError", "['up'] = 'col' is not a way to"),
        ({}, {"method": "drect"}, "UnknownNameError", "method = 'drect'"),
        ({}, {"mesh": "tp"}, "ShapeContractError", "mesh = 'tp' is of type str"),
    ],
)
def test_invalid_rules_and_options_are_rejected(rules, options, error, text):
    with pytest.raises(getattr(ub.errors, error), match=re.escape(text)):
        Overlap(rules, **options)
