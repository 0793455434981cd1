"""Flax modules and meshes that several tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from operands import normal
from random_parameters import random_parameters

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(dp: int, tp: int, types: str = "auto") -> Mesh:
    """Returns a mesh of the first devices with the axes "dp" and "tp"."""
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    return Mesh(devices, ("dp", "tp"), axis_types=(TYPES[types],) * 2)


class Block(nnx.Module):
    """A residual block of two linear layers, made by `up` and `down`."""

    def __init__(self, up, down, rngs):
        self.up = up(rngs)
        self.down = down(rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


def plain_block(rngs=None) -> Block:
    """A block of Flax's layers, without a mesh."""
    if rngs is None:
        return random_model(lambda: plain_block(nnx.Rngs(0)))
    return Block(
        lambda rngs: nnx.Linear(16, 32, rngs=rngs),
        lambda rngs: nnx.Linear(32, 16, rngs=rngs),
        rngs,
    )


def loss(model, x):
    """Computes a loss whose gradient differs for every element."""
    return jnp.sum(jnp.sin(model(x)))


@functools.cache
def _compiled(argnums):
    return nnx.jit(nnx.value_and_grad(loss, argnums=argnums))


def loss_and_gradients(model, x, argnums=0):
    """Returns the loss and gradients of a model of Flax, which compiles once."""
    return _compiled(argnums)(model, x)


def assert_learns_as(model, x, found, **tolerances):
    """Asserts that loss and gradients equal those of the model without a mesh."""
    value, gradients = loss_and_gradients(model, x)
    assert_trees_close(found[0], value, rtol=1e-4)
    actual, expected = map(nnx.to_pure_dict, (found[1], gradients))
    assert_trees_close(actual, expected, **tolerances)


def random_variables(module, x):
    """Returns random parameters of a linen module, and its initial FP8 states."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    return jax.tree.map(jnp.asarray, random_parameters(shapes))


def random_model(create):
    """Returns the nnx model that `create` returns, with random parameters.

    Models with the same paths and shapes have the same parameters. `create` is only
    traced, and must create its `nnx.Rngs`.
    """
    graph, state = nnx.split(nnx.eval_shape(create))
    shapes = nnx.to_pure_dict(state)
    values = random_parameters(shapes)
    if not jax.sharding.get_abstract_mesh().empty:
        values = jax.device_put(values, jax.tree.map(_spec, shapes))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, values))
    return nnx.merge(graph, state)


def random_layer(layer, *sizes, **options):
    """Returns an nnx layer with random parameters."""
    rngs = {"params": 0, "dropout": 7}
    return random_model(lambda: layer(*sizes, rngs=nnx.Rngs(**rngs), **options))


def _spec(shape):
    return P() if shape.sharding is None else shape.sharding.spec


def constant_init(key, shape, dtype):
    """Initializes a kernel without a PRNG, which is slower to compile than a layer."""
    return jnp.asarray(0.2 * normal(0, shape, dtype))


def linen_specs(variables):
    """Returns the specs of linen variables by layer name."""
    of_kernel = {"row": P("tp"), "column": P(None, "tp")}
    of_bias = {"row": P(), "column": P("tp")}
    kinds = {"out": "row", "fc2": "row"}
    kinds |= dict.fromkeys(("query", "key", "value", "fc1", "gate"), "column")

    def spec(path, _):
        layer, name = (entry.key for entry in path[-2:])
        return (of_bias if name == "bias" else of_kernel).get(kinds.get(layer), P())

    return jax.tree.map_with_path(spec, variables)


def assert_trees_close(actual, expected, rtol=2e-5, atol=2e-5):
    """Asserts that two trees have the same paths and shapes, and close values."""
    actual, expected = (dict(_by_path(tree)) for tree in (actual, expected))
    assert actual.keys() == expected.keys()
    for path in expected:
        assert actual[path].shape == expected[path].shape, path
        np.testing.assert_allclose(
            actual[path], expected[path], rtol=rtol, atol=atol, err_msg=path
        )


def _by_path(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf, np.float32)
