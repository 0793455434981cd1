"""Zeros at random places."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub import shapes
from jax_ub.ops.operation import BasicOperation
from jax_ub.primitives import mesh, varying


@dataclasses.dataclass(frozen=True, repr=False)
class Dropout(BasicOperation):
    """Sets elements to zero with probability `rate`, and scales the others up.

    The key comes with the call, `seq(params, x, key=key)`; each Dropout of a Sequential
    is_batchable in its place. Without a key the call must say `deterministic=True`, and
    the operation passes x on. Ranks on which x is the same draw the same mask, others
    draw their own: `jax.shard_map(check_vma=True)` knows the axes that x is sharded
    over, and with `check_vma=False` they are named here.

    Transformer Engine: `te.ops.Dropout`. No parameters. Residual: "mask", bool, where
    something is drawn.

    Attributes:
        rate: the probability of a zero, from 0 up to but not including 1.
        axis_name: the mesh axes that x is sharded over, beside those that are known.
    """

    rate: float
    _: dataclasses.KW_ONLY
    axis_name: str | tuple[str, ...] | None = None

    takes_key = True

    def __post_init__(self):
        """Checks the rate.

        Raises:
            ShapeContractError: if it is no probability below 1.
        """
        super().__post_init__()
        shapes.check_rate(self.label, "rate", self.rate)

    def saved(self, needs):
        """What was kept."""
        return frozenset({"mask"})

    def forward(self, params, x, extra_inputs, saves):
        """Draws a mask and applies it."""
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
        """Applies the same mask."""
        mask = residuals.get("mask")
        return dy if mask is None else self._masked(mask, dy), {}, ()

    def _masked(self, mask, x):
        return jnp.where(mask, x / (1 - self.rate), 0).astype(x.dtype)
