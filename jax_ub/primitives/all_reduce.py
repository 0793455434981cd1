"""The all-reduce (AR) without a GEMM."""

import dataclasses

import jax

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Call):
    """Sums x, of any shape, over the ranks: in f32, in rank order, rounded once."""

    target = "jax_ub$all_reduce"

    def shapes(self, x):
        """Returns the shape and dtype of x."""
        return [(x.shape, x.dtype)]

    def communicated(self, x):
        """Returns the shape of x."""
        return x.shape

    def on_one_rank(self, x):
        """Returns x, which is the sum over one rank."""
        return [x]

    def reference(self, x):
        """Computes `jax.lax.psum` in f32."""
        return [reference.all_reduce(x, self.axis_name).astype(x.dtype)]

    @property
    def replicates(self):
        """True: all ranks have the same sum."""
        return True

    @property
    def communicates_only(self):
        """True: the call has no GEMM."""
        return True


def all_reduce(x: jax.Array, **where) -> jax.Array:
    """Returns the sum of `x` over the ranks; `where` holds the fields of `Call`."""
    return AllReduce(**where)(x)[0]
