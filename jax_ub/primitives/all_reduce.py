"""AR alone: sums over the ranks."""

import dataclasses

import jax

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Call):
    """x of any shape, summed in f32 in rank order, rounded once."""

    target = "jax_ub$all_reduce"

    def shapes(self, x):
        """That of `x`."""
        return [(x.shape, x.dtype)]

    def communicated(self, x):
        """What is summed."""
        return x.shape

    def on_one_rank(self, x):
        """What the rank has is the sum."""
        return [x]

    def reference(self, x):
        """`jax.lax.psum` in f32."""
        return [reference.all_reduce(x, self.axis_name).astype(x.dtype)]

    @property
    def replicates(self):
        """The sum is the same on every rank."""
        return True

    @property
    def communicates_only(self):
        """There is no product."""
        return True


def all_reduce(x: jax.Array, **where) -> jax.Array:
    """Sums `x` over the ranks, on every rank."""
    return AllReduce(**where)(x)[0]
