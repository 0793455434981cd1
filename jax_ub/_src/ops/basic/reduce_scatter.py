"""An operation that reduce-scatters tokens over the ranks, with its gradient."""

import dataclasses

from jax_ub._src import checks as shapes
from jax_ub._src.ops.basic.collective import Collective, own
from jax_ub._src.primitives.all_gather import all_gather
from jax_ub._src.primitives.reduce_scatter import reduce_scatter


@dataclasses.dataclass(frozen=True, repr=False)
class ReduceScatter(Collective):
    """Sums x over the ranks and keeps a shard: `[..., M, K]` to `[..., M/P, K]`.

    The backward is an all-gather.

    Transformer Engine: `te.ops.ReduceScatter`, which scatters along the first
    dimension. No parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """

    def forward(self, params, x, extra_inputs, saves):
        """Sums x over the ranks in f32, rounds once, and keeps this rank's tokens."""
        call_config = self.call_config()
        shapes.check_rank(self.label, "x", x)
        self.check(x)
        shapes.check_divides(self.label, x, call_config.num_ranks)
        return (
            reduce_scatter(own(call_config, x), out_dtype=x.dtype, **call_config.alone),
            (),
            {},
        )

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """All-gathers dy along its tokens, axis -2."""
        call_config = self.call_config()
        return all_gather(dy, **call_config.alone), {}, ()
