"""An operation that sums an activation over the ranks, with its gradient."""

import dataclasses

from jax_ub._src.ops.basic.collective import Collective, own
from jax_ub._src.ops.basic.linear_products import is_partial_cotangent
from jax_ub._src.primitives.all_reduce import all_reduce


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Collective):
    """Sums an activation of any shape over the ranks, in f32, rounded once.

    The backward is the identity if dy is the complete gradient of y on every rank. It
    is an all-reduce if dy is partial, the gradient of this rank's use of y only:

    | reduce_in_backward | `shard_map(check_vma=True)` | `check_vma=False` |
    |---|---|---|
    | None | identity: y has a replicated type, so dy is complete | sum, as for `jax.lax.psum` |
    | False | identity | identity: correct if the loss is differentiated inside the `shard_map` and is the same on every rank |
    | True | sum: y has a varying type, so dy is partial | sum |

    Transformer Engine: `te.ops.AllReduce`. Its backward is always the identity; its
    `reduce_in_backward` has no effect. No parameters, no residuals.

    Attributes:
        axis_name: the mesh axis to sum over.
        reduce_in_backward: whether the backward sums dy over the ranks; see the table.
        method: the method; None takes `JAX_UB_METHOD` if set, else "auto".
    """  # noqa: E501, a table

    _: dataclasses.KW_ONLY
    reduce_in_backward: bool | None = None

    def forward(self, params, x, extra_inputs, saves):
        """Returns the sum of x over all ranks of the mesh axis."""
        call_config = self.call_config()
        self.check(x)
        y = all_reduce(own(call_config, x), **call_config.alone)
        return own(call_config, y) if self.reduce_in_backward else y, (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Returns the gradient of x: dy if it is complete, else its sum over the ranks.

        It is complete if each rank's dy already is the gradient of the sum.
        `reduce_in_backward` and the type of dy decide, as the class describes.
        """
        call_config = self.call_config()
        sums = self.reduce_in_backward
        if sums is None or (call_config.is_vma_checked and not sums):
            sums = is_partial_cotangent(call_config, dy)
        dx = all_reduce(dy, **call_config.alone) if sums else dy
        return own(call_config, dx), {}, ()  # typed like the operand of the sum
