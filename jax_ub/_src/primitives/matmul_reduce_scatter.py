"""The primitive of a GEMM whose product is reduce-scattered over the ranks."""

import dataclasses
import functools

from jax_ub._src import reference
from jax_ub._src.primitives.matmul import Matmul
from jax_ub._src.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulReduceScatter(SummedMatmul):
    """Computes this rank's rows of scale * sum_ranks sum_i x_i w_i + bias + residual.

    Operands: x_i [..., P*m, K_i], w_i [K_i, N], bias [N], residual [..., m, N]. Result:
    [..., m, N]. Bias and residual are added to this rank's rows.
    """

    target = "jax_ub$matmul_reduce_scatter"

    def reduced_rows(self, rows):
        """Returns how many of the `rows` rows of the sum each rank keeps."""
        return rows // self.num_ranks

    def on_one_rank(self, *operands):
        """Computes a local GEMM, because a single rank has no other summands."""
        return [self.plain(Matmul, operands)]

    def reduce(self, partial):
        """Sums the f32 products over the ranks, and keeps this rank's rows."""
        return reference.reduce_scatter(partial, self.axis_name)


matmul_reduce_scatter = functools.partial(call_summed_matmul, MatmulReduceScatter)
