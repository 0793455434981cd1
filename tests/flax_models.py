"""Flax modules and meshes that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(dp: int, tp: int, types: str = "auto") -> Mesh:
    """The first devices on the axes "dp" and "tp"."""
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
    """A block of Flax's own layers, which know nothing of meshes."""
    return Block(
        lambda rngs: nnx.Linear(16, 32, rngs=rngs),
        lambda rngs: nnx.Linear(32, 16, rngs=rngs),
        rngs if rngs is not None else nnx.Rngs(0),
    )


def loss(model, x):
    """A loss whose gradient differs at every element."""
    return jnp.sum(jnp.sin(model(x)))


def assert_trees_close(actual, expected, rtol=2e-5, atol=2e-5):
    """Asks two trees for the same paths and shapes, and close values."""
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
