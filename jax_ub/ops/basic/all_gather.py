"""All ranks' tokens."""

import dataclasses

from jax_ub import shapes
from jax_ub.ops.operation import BasicOperation
from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.reduce_scatter import reduce_scatter
from jax_ub.rules.site import open_site


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(BasicOperation):
    """Gathers tokens: `[..., M/P, K]` to `[..., M, K]`; its backward scatters sums.

    Transformer Engine: `te.ops.AllGather`, along its first dimension. No parameters, no
    residuals.

    Attributes:
        axis_name: the mesh axis to gather over.
        method: how it runs; None is `JAX_UB_METHOD`, or "auto".
    """

    axis_name: str = "tp"
    _: dataclasses.KW_ONLY
    method: str | None = None

    def saved(self, needs):
        """Nothing."""
        return frozenset()

    def forward(self, params, x, extra_inputs, saves):
        """Gathers."""
        site = open_site(self.label, self.axis_name, None, self.method)
        shapes.check_rank(self.label, "x", x)
        shapes.check_float(self.label, x=x)
        shapes.check_not_empty(self.label, "x", x)
        return all_gather(x, **site.alone), (), {}

    def backward(self, residuals, dy, d_extra_outputs, needs):
        """Sums dy over the ranks and keeps the own tokens."""
        site = open_site(self.label, self.axis_name, None, self.method)
        return reduce_scatter(dy, out_dtype=dy.dtype, **site.alone), {}, ()
