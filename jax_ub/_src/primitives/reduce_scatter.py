"""The primitive of a reduce-scatter without a GEMM."""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(Call):
    """Sums x [..., P*m, K] over the ranks, and keeps this rank's rows [..., m, K].

    Sums are computed in f32, in rank order, and rounded once.
    """

    target = "jax_ub$reduce_scatter"

    out_dtype: np.dtype

    def shapes(self, x):
        """Returns the shape and dtype of this rank's rows of the sum, `[..., m, K]`."""
        rows = x.shape[-2] // self.num_ranks
        return [((*x.shape[:-2], rows, x.shape[-1]), self.out_dtype)]

    def communicated(self, x):
        """Returns the shape of x, because the ranks exchange all of x."""
        return x.shape

    def on_one_rank(self, x):
        """Returns x in `out_dtype`, which is the sum over a single rank."""
        return [x.astype(self.out_dtype)]

    def reference(self, x):
        """Computes the result by `jax.lax.psum_scatter` in f32."""
        return [reference.reduce_scatter(x, self.axis_name).astype(self.out_dtype)]

    @property
    def communicates_only(self):
        """Returns True, because the call is a collective without a GEMM."""
        return True


def reduce_scatter(x: jax.Array, *, out_dtype, **where) -> jax.Array:
    """Sums `x` over the ranks, and keeps this rank's rows.

    Maps `[..., P*m, K]` to `[..., m, K]`. `where` holds the fields of `Call`.
    """
    return ReduceScatter(out_dtype=np.dtype(out_dtype), **where)(x)[0]
