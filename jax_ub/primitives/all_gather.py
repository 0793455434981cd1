"""The all-gather (AG) without a GEMM."""

import dataclasses

import jax

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Call):
    """All-gathers rows: x [..., m, K] -> [..., P*m, K]."""

    target = "jax_ub$all_gather"

    def shapes(self, x):
        """Returns the shape of the rows of all ranks."""
        return [((*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1]), x.dtype)]

    def communicated(self, x):
        """Returns the shape of the rows of all ranks."""
        return (*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1])

    def on_one_rank(self, x):
        """Returns x: one rank has all rows."""
        return [x]

    def reference(self, x):
        """Computes `jax.lax.all_gather`."""
        return [reference.all_gather(x, self.axis_name)]

    @property
    def gathers(self):
        """True: the call all-gathers."""
        return True

    @property
    def communicates_only(self):
        """True: the call has no GEMM."""
        return True


def all_gather(x: jax.Array, **where) -> jax.Array:
    """All-gathers the rows of `x`: `[..., m, K]` -> `[..., P*m, K]`.

    `where` holds the fields of `Call`.
    """
    return AllGather(**where)(x)[0]
