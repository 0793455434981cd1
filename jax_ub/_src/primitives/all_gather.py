"""The primitive of an all-gather without a GEMM."""

import dataclasses

import jax

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Call):
    """All-gathers the rows of x over the ranks: [..., m, K] -> [..., P*m, K]."""

    target = "jax_ub$all_gather"

    def shapes(self, x):
        """Returns the shape `[..., P*m, K]` and the dtype of the gathered rows."""
        return [((*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1]), x.dtype)]

    def communicated(self, x):
        """Returns the shape of the gathered array, `[..., P*m, K]`."""
        return (*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1])

    def on_one_rank(self, x):
        """Returns x itself, because a single rank already has all rows."""
        return [x]

    def reference(self, x):
        """Computes the result by `jax.lax.all_gather`."""
        return [reference.all_gather(x, self.axis_name)]

    @property
    def gathers(self):
        """Returns True, because this call's collective is an all-gather."""
        return True

    @property
    def communicates_only(self):
        """Returns True, because the call is a collective without a GEMM."""
        return True


def all_gather(x: jax.Array, **where) -> jax.Array:
    """All-gathers the rows of `x`, `[..., m, K]` -> `[..., P*m, K]`, by its primitive.

    `where` holds the fields of `Call`.
    """
    return AllGather(**where)(x)[0]
