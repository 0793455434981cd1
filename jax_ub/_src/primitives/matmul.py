"""The primitive of a GEMM without communication, with bias and residual."""

import dataclasses
import functools

from jax_ub._src.primitives.summed_matmul import SummedMatmul, call_summed_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul(SummedMatmul):
    """Computes scale * sum_i x_i w_i + bias + residual, without communication.

    Operands: x_i [..., m, K_i], w_i [K_i, N], bias [N], residual [..., m, N]. Result:
    [..., m, N].
    """

    target = "jax_ub$matmul"

    def aliases(self, operands):
        """Lets the result overwrite the residual, if both have the same dtype."""
        place = len(operands) - 1
        fits = self.has_residual and operands[place].dtype == self.out_dtype
        return {place: 0} if fits else {}


matmul = functools.partial(call_summed_matmul, Matmul)
