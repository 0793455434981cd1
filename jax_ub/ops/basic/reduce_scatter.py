"""The own tokens of the sum over the ranks."""

import dataclasses

from jax_ub import shapes
from jax_ub.ops.basic.collective import Collective, own
from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.reduce_scatter import reduce_scatter


@dataclasses.dataclass(frozen=True, repr=False)
class ReduceScatter(Collective):
    """Sums and scatters tokens: `[..., M, K]` to `[..., M/P, K]`; backward gathers.

    Transformer Engine: `te.ops.ReduceScatter`, along its first dimension. No
    parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
    """

    def forward(self, params, x, extra_inputs, saves):
        """Sums in f32, rounds once and keeps the own tokens."""
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
        """Gathers dy."""
        call_config = self.call_config()
        return all_gather(dy, **call_config.alone), {}, ()
