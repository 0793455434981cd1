"""GEMM+AR: sums the products of all ranks on every rank."""

import dataclasses
import functools

from jax_ub import reference
from jax_ub.primitives.matmul import Matmul
from jax_ub.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulAllReduce(SummedMatmul):
    """x_i [..., m, K_i], w_i [K_i, N], bias [N], residual [..., m, N].

    Bias and residual are added once, after the reduction, so they and the result are
    the same on every rank.
    """

    target = "jax_ub$matmul_all_reduce"

    def on_one_rank(self, *operands):
        """The rank's products are the sum."""
        return [self.plain(Matmul, operands)]

    def reduce(self, partial):
        """Sums over the ranks in f32."""
        return reference.all_reduce(partial, self.axis_name)

    def is_replicated(self, index):
        """Bias and residual."""
        return index >= 2 * self.num_pairs

    @property
    def replicates(self):
        """The sum is the same on every rank."""
        return True


matmul_all_reduce = functools.partial(call_summed_matmul, MatmulAllReduce)
