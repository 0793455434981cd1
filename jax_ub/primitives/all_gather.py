"""AG alone: gathers rows."""

import dataclasses

import jax

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Call):
    """x [..., m, K] -> [..., P*m, K]."""

    target = "jax_ub$all_gather"

    def shapes(self, x):
        """All ranks' rows."""
        return [((*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1]), x.dtype)]

    def communicated(self, x):
        """All ranks' rows of x."""
        return (*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1])

    def on_one_rank(self, x):
        """The rank's rows are all rows."""
        return [x]

    def reference(self, x):
        """`jax.lax.all_gather`."""
        return [reference.all_gather(x, self.axis_name)]

    @property
    def gathers(self):
        """Rows are gathered."""
        return True

    @property
    def communicates_only(self):
        """There is no product."""
        return True


def all_gather(x: jax.Array, **where) -> jax.Array:
    """Gathers the rows of all ranks: `[..., m, K]` -> `[..., P*m, K]`."""
    return AllGather(**where)(x)[0]
