"""An operation that all-gathers token shards, with its gradient."""

import dataclasses

from jax_ub._src import checks as shapes
from jax_ub._src.ops.basic.collective import Collective, own
from jax_ub._src.primitives.all_gather import all_gather
from jax_ub._src.primitives.reduce_scatter import reduce_scatter


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Collective):
    """All-gathers the token shards of the ranks: `[..., M/P, K]` to `[..., M, K]`.

    The backward is a reduce-scatter.

    Transformer Engine: `te.ops.AllGather`, which gathers along the first dimension. No
    parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to gather over.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """

    def forward(self, params, x, extra_inputs, saves):
        """All-gathers x along its tokens, axis -2."""
        call_config = self.call_config()
        shapes.check_rank(self.label, "x", x)
        self.check(x)
        return all_gather(own(call_config, x), **call_config.alone), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Reduce-scatters dy along its tokens, axis -2."""
        call_config = self.call_config()
        return reduce_scatter(dy, out_dtype=dy.dtype, **call_config.alone), {}, ()
