"""RS alone: sums over the ranks and keeps this rank's rows."""

import dataclasses

import jax
import numpy as np

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(Call):
    """x [..., P*m, K] -> [..., m, K], summed in f32 in rank order, rounded once."""

    target = "jax_ub$reduce_scatter"

    out_dtype: np.dtype

    def shapes(self, x):
        """The own rows."""
        rows = x.shape[-2] // self.num_ranks
        return [((*x.shape[:-2], rows, x.shape[-1]), self.out_dtype)]

    def communicated(self, x):
        """What is summed."""
        return x.shape

    def on_one_rank(self, x):
        """What the rank has is the sum."""
        return [x.astype(self.out_dtype)]

    def reference(self, x):
        """`jax.lax.psum_scatter` in f32."""
        return [reference.reduce_scatter(x, self.axis_name).astype(self.out_dtype)]

    @property
    def communicates_only(self):
        """There is no product."""
        return True


def reduce_scatter(x: jax.Array, *, out_dtype, **where) -> jax.Array:
    """Sums the rows over the ranks: `[..., P*m, K]` -> `[..., m, K]`."""
    return ReduceScatter(out_dtype=np.dtype(out_dtype), **where)(x)[0]
