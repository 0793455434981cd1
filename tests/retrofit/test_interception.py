"""Interceptions of JAX's products apply to overlapped layers as to plain ones."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from flax import linen as nn
from flax import nnx
from flax_models import assert_trees_close, mesh_of, random_variables
from intercepted import replaced_attribute, replaced_code, twice
from jax import lax
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, compiled_text

import jax_ub as ub
from jax_ub.flax.linen import Overlap

INTERCEPTIONS = {
    "code of dot_general": lambda: replaced_code(lax.dot_general, twice),
    "code of einsum": lambda: replaced_code(jnp.einsum, twice),
    "attribute dot_general": lambda: replaced_attribute(lax, "dot_general", twice),
    "attribute einsum": lambda: replaced_attribute(jnp, "einsum", twice),
    "attribute dot": lambda: replaced_attribute(jnp, "dot", twice),
}
KINDS = {"up": "column", "down": "row", "head.attend": "column"}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Einsum("BTN,ND->BTD", (32, 16), None, rngs=rngs)
        self.head = nnx.Embed(24, 16, rngs=rngs)

    def __call__(self, x):
        return self.head.attend(self.down(self.up(x)))


class LinenNet(nn.Module):
    def setup(self):
        self.up = nn.Dense(32)
        self.down = nn.Einsum((32, 16), "BTN,ND->BTD")
        self.head = nn.Embed(24, 16)

    def __call__(self, x):
        return self.head.attend(self.down(self.up(x)))


def nnx_programs():
    """Returns a program with plain layers, one with overlapped ones, and arguments."""
    plain, model = Net(), ub.overlap(Net(), KINDS)
    assert ub.overlapped(model) == KINDS
    return plain, model


def linen_programs(x):
    net = LinenNet()
    variables = random_variables(net, x)

    def overlapped(x):
        with Overlap(KINDS) as overlap:
            y = net.apply(variables, x)
        assert overlap.overlapped == KINDS
        return y

    return lambda x: net.apply(variables, x), overlapped


@covering(way=INTERCEPTIONS, flax=["nnx", "linen"])
def test_an_overlapped_model_is_intercepted_as_the_plain_one(flax, way):
    x = normal(0, (2, 8, 16))
    plain, model = nnx_programs() if flax == "nnx" else linen_programs(x)

    def run(net):
        jax.clear_caches()  # JAX caches traces of its functions
        return jax.jit(lambda x: net(x))(x)

    with jax.set_mesh(mesh_of(1, 2)):
        with INTERCEPTIONS[way]():
            expected = run(plain)
            assert_trees_close(run(model), expected)
        assert_trees_close(run(model), run(plain))
        text = compiled_text(jax.jit(lambda x: model(x)), x)
    assert sum(calls(text).values()) == 3


def test_an_interception_is_recorded_by_name():
    model = ub.overlap(Net(), KINDS)
    with jax.set_mesh(mesh_of(1, 2)), replaced_code(lax.dot_general, twice):
        model(normal(0, (2, 8, 16)))
    found = {note.label: note.reason for note in ub.fallbacks()[-3:]}
    assert list(found) == [
        "linear(parallel='column') (layer 'up')",
        "linear(parallel='row') (layer 'down')",
        "linear(parallel='column') (layer 'head.attend')",
    ]
    for reason in found.values():
        text = "the code of jax.lax.dot_general is replaced by that of 'stand_in' in "
        assert reason.startswith(text)
        assert reason.endswith("intercepted.py, which an overlapped call would bypass")


def test_a_layer_looks_up_jax_lax_dot_general_at_each_call():
    layer = nn.Dense(32, dot_general=ub.dot_general("column"))
    x = normal(0, (2, 8, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        variables = layer.init(jax.random.key(0), x)
        expected = 2 * layer.apply(variables, x)
        with replaced_attribute(lax, "dot_general", twice):
            assert_trees_close(layer.apply(variables, x), expected)
    assert "jax.lax.dot_general is replaced by <function" in ub.fallbacks()[-1].reason


@pytest.mark.parametrize("method", ["direct", "ring_exchange"])
def test_an_explicit_method_is_rejected_under_an_interception(method):
    model = ub.overlap(Net(), KINDS, method=method)
    text = r"layer 'up'\): the code of jax.lax.dot_general.* Leave out the method"
    with (
        jax.set_mesh(mesh_of(1, 2)),
        replaced_code(lax.dot_general, twice),
        pytest.raises(ub.errors.UnsupportedOverlapError, match=text),
    ):
        model(normal(0, (2, 8, 16)))


def test_shards_are_rejected_under_an_interception():
    def layer(x, w):
        dims = (((1,), (0,)), ((), ()))
        return ub.dot_general("column")(x, w, dims)

    text = re.escape("would bypass, and inside shard_map over 'tp' nothing else would")
    with (
        replaced_code(lax.dot_general, twice),
        pytest.raises(ub.errors.UnsupportedOverlapError, match=text),
    ):
        jax.shard_map(
            layer,
            mesh=mesh_of(1, 2),
            in_specs=(P("tp"), P(None, "tp")),
            out_specs=P(None, "tp"),
        )(jnp.ones((8, 16)), jnp.ones((16, 32)))


def sharded_net():
    def linear(rngs, *sizes, names):
        return nnx.Linear(*sizes, rngs=rngs, kernel_metadata={"out_sharding": names})

    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        linear(rngs, 16, 32, names=(None, "tp")),
        linear(rngs, 32, 16, names=("tp", None)),
    )


def provider(qwix, name):
    if name == "lora":
        return qwix.LoraProvider(module_path=".*", rank=4, alpha=2.0)
    rule = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8}
    rules = [qwix.QuantizationRule(module_path=".*", **rule)]
    return qwix.QtProvider(rules) if name == "qt" else qwix.PtqProvider(rules)


def qwix_model(qwix, name, model, x):
    if name != "lora":
        return qwix.quantize_model(model, provider(qwix, name), x)
    given = {"rngs": nnx.Rngs(1)}
    model = qwix.apply_lora_to_model(model, provider(qwix, name), x, **given)
    for path, value in nnx.iter_graph(model):
        if path and path[-1] == "kernel_lora_b":
            value.set_value(jnp.ones_like(value.get_value()))
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, in Qwix
@pytest.mark.parametrize("order", ["overlap first", "overlap last"])
@pytest.mark.parametrize("name", ["lora", "qt", "ptq"])
def test_qwix_reaches_an_overlapped_nnx_model(name, order):
    qwix = pytest.importorskip("qwix", reason="qwix is not installed")
    x = normal(0, (4, 16))
    with jax.set_mesh(mesh_of(1, 2)):
        expected = qwix_model(qwix, name, sharded_net(), x)(x)
        assert np.abs(expected - sharded_net()(x)).max() > 1e-3
        if order == "overlap first":
            model = qwix_model(qwix, name, ub.overlap(sharded_net()), x)
        else:
            model = ub.overlap(qwix_model(qwix, name, sharded_net(), x))
        assert_trees_close(model(x), expected)
    assert "qwix" in ub.fallbacks()[-1].reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, in Qwix
@pytest.mark.parametrize("name", ["lora", "qt", "ptq"])
def test_qwix_reaches_an_overlapped_linen_model(name):
    qwix = pytest.importorskip("qwix", reason="qwix is not installed")
    net, x = nn.Sequential([nn.Dense(32), nn.Dense(16)]), normal(0, (4, 16))
    change = qwix.apply_lora_to_model if name == "lora" else qwix.quantize_model
    net = change(net, provider(qwix, name))
    variables = random_variables(net, x)
    if name == "lora":
        variables = jax.tree.map(lambda leaf: leaf + 0.1, variables)
    expected = net.apply(variables, x)
    block = Overlap({"layers_0": "column", "layers_1": "row"})
    with jax.set_mesh(mesh_of(1, 2)), contextlib.ExitStack() as stack:
        stack.enter_context(block)
        assert_trees_close(net.apply(variables, x), expected)
    assert "qwix" in ub.fallbacks()[-1].reason
