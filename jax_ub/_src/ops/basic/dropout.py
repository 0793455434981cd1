"""An operation that applies dropout, with masks that differ between shards."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src import checks as shapes
from jax_ub._src.ops.operation import BasicOperation
from jax_ub._src.primitives import mesh, varying


@dataclasses.dataclass(frozen=True, repr=False)
class Dropout(BasicOperation):
    """Zeroes each element with probability `rate`; divides the others by `1 - rate`.

    The PRNG key is an argument of the call, `seq(params, x, key=key)`. The fuser folds
    the index of each Dropout into the key. A call with `deterministic=True` needs no
    key, and the operation returns x unchanged.

    Ranks with different shards of x draw different masks; ranks with the same x draw
    the same mask. With `jax.shard_map(check_vma=True)`, the type of x contains the mesh
    axes that x is sharded over. With `check_vma=False`, name them in `axis_name`.

    Transformer Engine: `te.ops.Dropout`. No parameters. Residual: "mask", bool, if a
    mask is drawn.

    Attributes:
        rate: the probability of zeroing an element, in [0, 1).
        axis_name: mesh axes that x is sharded over, in addition to those in its type.
    """

    rate: float
    _: dataclasses.KW_ONLY
    axis_name: str | tuple[str, ...] | None = None

    takes_key = True

    def __post_init__(self):
        """Checks the dropout rate and the types of the other fields.

        Raises:
            ShapeContractError: if `rate` is not in [0, 1).
        """
        super().__post_init__()
        shapes.check_rate(self.label, "rate", self.rate)

    def saved(self, needs):
        """Returns "mask", the dropout mask that the backward reads."""
        return frozenset({"mask"})

    def forward(self, params, x, extra_inputs, saves):
        """Draws a mask and applies it to x; returns x unchanged without a PRNG key."""
        shapes.check_float(self.label, x=x)
        if self.axis_name is not None:
            mesh.axis_size(self.label, self.axis_name)
        if "key" not in params or self.rate == 0:
            return x, (), {}
        key = params["key"]
        named = mesh.axis_tuple(self.axis_name)
        for axis in sorted(varying.axes_of(x) | frozenset(named)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        mask = jax.random.bernoulli(key, 1 - self.rate, x.shape)
        return self._masked(mask, x), (), {"mask": mask}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Applies the mask that the forward drew to dy."""
        mask = residuals.get("mask")
        return dy if mask is None else self._masked(mask, dy), {}, ()

    def _masked(self, mask, x):
        return jnp.where(mask, x / (1 - self.rate), 0).astype(x.dtype)
