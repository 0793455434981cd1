"""The sum over the ranks."""

import dataclasses

from jax_ub.ops.basic.collective import Collective, own
from jax_ub.ops.basic.linear_products import is_partial_cotangent
from jax_ub.primitives.all_reduce import all_reduce


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """Sums an activation of any shape over the ranks, in f32, rounded once.

    Its backward is the identity where the gradient of y is already that of all ranks'
    further computation, and a sum where each rank has only its own part of it:

    | reduce_in_backward | `shard_map(check_vma=True)` | `check_vma=False` |
    |---|---|---|
    | None | identity: y is typed as replicated, its gradient is whole | sum, as for `jax.lax.psum` |
    | False | identity | identity: right where the loss is differentiated inside the `shard_map`, the same on every rank |
    | True | sum: every rank goes on with y as its own, typed as varying | sum |

    Transformer Engine: `te.ops.AllReduce`, whose backward is always the identity: its
    `reduce_in_backward` has no effect. No parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        reduce_in_backward: see above.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
    """  # noqa: E501, a table

    _: dataclasses.KW_ONLY
    reduce_in_backward: bool | None = None

    def forward(self, params, x, extra_inputs, saves):
        """Sums."""
        call_config = self.call_config()
        self.check(x)
        y = all_reduce(own(call_config, x), **call_config.alone)
        return own(call_config, y) if self.reduce_in_backward else y, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Passes dy on, or sums it."""
        call_config = self.call_config()
        sums = self.reduce_in_backward
        if sums is None or (call_config.is_vma_checked and not sums):
            sums = is_partial_cotangent(call_config, dy)
        dx = all_reduce(dy, **call_config.alone) if sums else dy
        return own(call_config, dx), {}, ()  # as the forward summed it
