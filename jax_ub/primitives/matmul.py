"""The GEMM alone: sums the products of one rank, and what is added to them."""

import dataclasses
import functools

from jax_ub.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul(SummedMatmul):
    """x_i [..., m, K_i], w_i [K_i, N], bias [N], residual [..., m, N]."""

    target = "jax_ub$matmul"

    def aliases(self, operands):
        """The result is written into the residual's buffer."""
        place = len(operands) - 1
        fits = self.has_residual and operands[place].dtype == self.out_dtype
        return {place: 0} if fits else {}


matmul = functools.partial(call_summed_matmul, Matmul)
