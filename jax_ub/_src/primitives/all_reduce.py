"""The primitive of an all-reduce without a GEMM."""

import dataclasses

import jax

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Call):
    """Sums x, of any shape, over the ranks, in f32 and in rank order; rounds once."""

    target = "jax_ub$all_reduce"

    def shapes(self, x):
        """Returns the shape and dtype of x, which the result has, too."""
        return [(x.shape, x.dtype)]

    def communicated(self, x):
        """Returns the shape of x, because the ranks exchange all of x."""
        return x.shape

    def on_one_rank(self, x):
        """Returns x itself, which is the sum over a single rank."""
        return [x]

    def reference(self, x):
        """Computes the sum over the ranks by `jax.lax.psum` in f32."""
        return [reference.all_reduce(x, self.axis_name).astype(x.dtype)]

    @property
    def replicates(self):
        """Returns True, because all ranks get the same sum."""
        return True

    @property
    def communicates_only(self):
        """Returns True, because the call is a collective without a GEMM."""
        return True


def all_reduce(x: jax.Array, **where) -> jax.Array:
    """Returns the sum of `x` over the ranks. `where` holds the fields of `Call`."""
    return AllReduce(**where)(x)[0]
