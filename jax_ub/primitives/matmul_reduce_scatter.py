"""GEMM+RS: sums the products of all ranks and keeps this rank's rows."""

import dataclasses
import functools

from jax_ub import reference
from jax_ub.primitives.matmul import Matmul
from jax_ub.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulReduceScatter(SummedMatmul):
    """x_i [..., P*m, K_i], w_i [K_i, N], bias [N], residual [..., m, N]."""

    target = "jax_ub$matmul_reduce_scatter"

    def reduced_rows(self, rows):
        """The own rows."""
        return rows // self.num_ranks

    def on_one_rank(self, *operands):
        """The rank's products are the sum."""
        return [self.plain(Matmul, operands)]

    def reduce(self, partial):
        """Sums over the ranks in f32."""
        return reference.reduce_scatter(partial, self.axis_name)


matmul_reduce_scatter = functools.partial(call_summed_matmul, MatmulReduceScatter)
