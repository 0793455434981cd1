"""An operation that reshapes an activation."""

import dataclasses
import math

import jax.numpy as jnp

from jax_ub._src.checks import is_integer
from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.ops.operation import BasicOperation


@dataclasses.dataclass(frozen=True, repr=False)
class Reshape(BasicOperation):
    """Reshapes x. If x is sharded, `shape` is the shape of this rank's shard.

    Transformer Engine: `te.ops.Reshape`. No parameters. Residual: "shape", an empty
    array `[0, *x.shape]`.

    Attributes:
        shape: the new shape; one size may be -1, which is inferred as in `jnp.reshape`.
    """

    shape: tuple[int, ...]

    def __post_init__(self):
        """Stores the shape as a tuple of integers, which is hashable.

        Raises:
            ShapeContractError: if `shape` is not a tuple or list of integers.
        """
        shape = self.shape
        if not isinstance(shape, tuple | list) or not all(map(is_integer, shape)):
            raise ShapeContractError(
                f"{self.label}: shape = {shown(shape)} is not a tuple of sizes. Pass "
                "one, for example (-1, 128)."
            )
        object.__setattr__(self, "shape", tuple(shape))
        super().__post_init__()

    def saved(self, needs):
        """Returns "shape", an empty array from whose shape the backward reads x's."""
        return frozenset({"shape"})

    def forward(self, params, x, extra_inputs, saves):
        """Reshapes x to `shape`, which must have as many elements.

        Raises:
            ShapeContractError: if the number of elements differs.
        """
        known = math.prod(size for size in self.shape if size != -1)
        fits = x.size == known if -1 not in self.shape else known and not x.size % known
        if not fits or self.shape.count(-1) > 1:
            raise ShapeContractError(
                f"{self.label}: x has shape {x.shape}, {x.size} elements, which do not "
                f"fit shape = {self.shape}. Leave at most one size to -1, and let the "
                "others' product divide the elements."
            )
        return x.reshape(self.shape), (), {"shape": jnp.zeros((0, *x.shape), jnp.int8)}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Reshapes dy to the shape that x had in the forward."""
        return dy.reshape(residuals["shape"].shape[1:]), {}, ()
