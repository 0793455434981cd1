import jax
import jax.numpy as jnp
from covering import covering, nightly
from flax import nnx
from flax_models import assert_trees_close, loss, mesh_of, random_layer
from jax.sharding import PartitionSpec as P
from operands import normal

from jax_ub.flax import Linear, MultiHeadAttention, TransformerLayer

X = (4, 8, 16)


class Doubled(Linear):
    """A subclass that computes something else than `Linear`."""

    def __call__(self, inputs, **options):
        return 2 * super().__call__(inputs, **options)


class Wrapped(nnx.Module):
    """A module that has none of the attributes and arguments of `Linear`."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, inputs):
        return 2 * self.layer(inputs)


def doubled(layer):
    """Returns the layer as an instance of `Doubled`."""
    layer.__class__ = Doubled
    return layer


def transformer_layer(**options):
    return random_layer(TransformerLayer, 16, 32, 4, activation="swiglu", **options)


def value_and_gradient(model, x):
    function = nnx.value_and_grad(loss, argnums=1)
    return nnx.jit(function)(model, x)


@covering(
    names=[("query", "out", "fc1"), ("gate", "fc2", "value"), *nightly(("key",))],
    replace=[doubled, Wrapped],
)
def test_a_transformer_layer_calls_the_layers_that_replace_its_own(names, replace):
    with jax.set_mesh(mesh_of(2, 2)):
        x = jax.device_put(normal(0, X), P("dp", "tp"))
        expected, model = transformer_layer(), transformer_layer()
        for name in names:
            owner = "attention" if hasattr(model.attention, name) else "mlp"
            linear = getattr(getattr(expected, owner), name)
            for parameter in (linear.kernel, linear.bias):
                parameter[...] = 2 * parameter[...]
            parent = getattr(model, owner)
            setattr(parent, name, replace(getattr(parent, name)))
        actual, expected = (value_and_gradient(each, x) for each in (model, expected))
    assert_trees_close(actual, expected)


def test_adapters_of_the_inner_layers_are_trained():
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    with jax.set_mesh(mesh_of(2, 2)):
        x = jax.device_put(normal(0, X), P("dp", "tp"))
        model, expected = (
            transformer_layer(hidden_dropout=0.1, deterministic=True) for _ in range(2)
        )
        b_init = {"b_initializer": nnx.initializers.normal(0.3)}
        options = {**b_init, "rngs": nnx.Rngs(1)}
        for name, ins, outs in (("fc1", 16, 32), ("gate", 16, 32), ("fc2", 32, 16)):
            base = getattr(model.mlp, name)
            lora = nnx.LoRA(ins, 2, outs, base_module=base, **options)
            kernel = getattr(expected.mlp, name).kernel
            kernel[...] = kernel[...] + lora.lora_a[...] @ lora.lora_b[...]
            setattr(model.mlp, name, lora)
        gradient = nnx.jit(nnx.grad(loss, argnums=adapters))(model, x)
        actual, expected = (value_and_gradient(each, x) for each in (model, expected))
        model.train()
        assert jnp.isfinite(nnx.jit(loss)(model, x))
    assert_trees_close(actual, expected)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_layers_that_differ_in_an_option_do_not_share_a_call():
    options = {"parallel": "column", "rngs": nnx.Rngs(1)}
    with jax.set_mesh(mesh_of(2, 2)):
        x = jax.device_put(normal(0, X), P("dp", "tp"))
        model = random_layer(MultiHeadAttention, 4, 16)
        model.key = Linear(16, (4, 4), preferred_element_type=jnp.bfloat16, **options)
        model.attention_fn = lambda q, k, v, **_: q + k + v
        found = nnx.jit(lambda model, x: model(x))(model, x)
        key = model.key(x)
        assert key.dtype == jnp.bfloat16
        heads = model.query(x) + key + model.value(x)
        expected = model.out(heads)
    assert_trees_close(found, expected, rtol=0, atol=1e-6)
