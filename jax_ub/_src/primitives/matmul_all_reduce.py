"""The primitive of a GEMM whose product is all-reduced over the ranks."""

import dataclasses
import functools

from jax_ub._src import reference
from jax_ub._src.primitives.matmul import Matmul
from jax_ub._src.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulAllReduce(SummedMatmul):
    """Computes scale * sum_ranks sum_i x_i w_i + bias + residual on every rank.

    Operands: x_i [..., m, K_i], w_i [K_i, N], bias [N], residual [..., m, N]. Result:
    [..., m, N]. Bias and residual are added once, after the reduction, so they and the
    result are the same on every rank.
    """

    target = "jax_ub$matmul_all_reduce"

    def on_one_rank(self, *operands):
        """Computes a local GEMM, because a single rank has no other summands."""
        return [self.plain(Matmul, operands)]

    def reduce(self, partial):
        """Sums the f32 products over the ranks, so that every rank has the sum."""
        return reference.all_reduce(partial, self.axis_name)

    def is_replicated(self, index):
        """Returns whether operand `index` is the bias or the residual."""
        return index >= 2 * self.num_pairs

    @property
    def replicates(self):
        """Returns True, because all ranks get the same sum."""
        return True


matmul_all_reduce = functools.partial(call_summed_matmul, MatmulAllReduce)
