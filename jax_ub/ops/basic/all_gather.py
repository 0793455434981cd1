"""All ranks' tokens."""

import dataclasses

from jax_ub import shapes
from jax_ub.ops.basic.collective import Collective, own
from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.reduce_scatter import reduce_scatter


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """Gathers tokens: `[..., M/P, K]` to `[..., M, K]`; its backward scatters sums.

    Transformer Engine: `te.ops.AllGather`, along its first dimension. No parameters, no
    residuals.

    Attributes:
        axis_name: the mesh axis to gather over.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
    """

    def forward(self, params, x, extra_inputs, saves):
        """Gathers."""
        call_config = self.call_config()
        shapes.check_rank(self.label, "x", x)
        self.check(x)
        return all_gather(own(call_config, x), **call_config.alone), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Sums dy over the ranks and keeps the own tokens."""
        call_config = self.call_config()
        return reduce_scatter(dy, out_dtype=dy.dtype, **call_config.alone), {}, ()
