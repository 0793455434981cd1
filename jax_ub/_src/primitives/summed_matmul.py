"""`SummedMatmul`: base class of the primitives that sum several products.

Operands are all x_i, all w_i, then bias and residual, if there are any. The result is
scale * sum_i x_i w_i, optionally reduced over the ranks, plus bias and residual,
rounded once.
"""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedMatmul(Call):
    """Base class of calls that compute scale * sum_i x_i w_i, plus bias and residual.

    A subclass that communicates overrides `reduce`, and `reduced_rows` if it scatters.
    """

    num_pairs: int
    rhs_transposed: bool
    has_bias: bool
    has_residual: bool
    scale: float = 1.0
    out_dtype: np.dtype

    def plain(self, kind: "type[SummedMatmul]", operands) -> jax.Array:
        """Computes the products without communication, by the call class `kind`."""
        n = self.num_pairs
        addends = iter(operands[2 * n :])
        return call_summed_matmul(
            kind,
            operands[:n],
            operands[n : 2 * n],
            next(addends) if self.has_bias else None,
            next(addends) if self.has_residual else None,
            rhs_transposed=self.rhs_transposed,
            scale=self.scale,
            out_dtype=self.out_dtype,
            **self.local,
        )

    def reduced_rows(self, rows: int) -> int:
        """Returns the rows of the result: `rows`, unless a subclass scatters them."""
        return rows

    def reduce(self, partial: jax.Array) -> jax.Array:
        """Reduces the f32 product over the ranks; this base class returns it as is."""
        return partial

    def shapes(self, x, *others):
        """Returns the result's shape, `[..., reduced_rows, N]`, and its dtype."""
        w = others[self.num_pairs - 1]
        columns = w.shape[0 if self.rhs_transposed else 1]
        rows = self.reduced_rows(x.shape[-2])
        return [((*x.shape[:-2], rows, columns), self.out_dtype)]

    def communicated(self, x, *others):
        """Returns the shape of the local product, which is reduced over the ranks."""
        w = others[self.num_pairs - 1]
        return (*x.shape[:-1], w.shape[0 if self.rhs_transposed else 1])

    def reference(self, *operands):
        """Computes the result by plain dot products and `reduce`."""
        n = self.num_pairs
        xs, ws, addends = operands[:n], operands[n : 2 * n], operands[2 * n :]
        partial = reference.dots(xs, ws, rhs_transposed=self.rhs_transposed)
        y = reference.scaled(self.reduce(partial), self.scale)
        return [reference.add(y, *addends, out_dtype=self.out_dtype)]

    def options(self):
        """Returns the FFI attributes of this target, which csrc/ffi decodes."""
        return {
            "num_pairs": self.num_pairs,
            "rhs_transposed": self.rhs_transposed,
            "has_bias": self.has_bias,
            "has_residual": self.has_residual,
            "scale": np.float32(self.scale),
        }

    def is_activation(self, index):
        """Returns whether operand `index` is an x_i or the residual."""
        return index < self.num_pairs or (
            self.has_residual and index == 2 * self.num_pairs + self.has_bias
        )


def call_summed_matmul(
    kind: type[SummedMatmul],
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    rhs_transposed: bool = False,
    scale: float = 1.0,
    out_dtype,
    **where,
) -> jax.Array:
    """Computes scale * sum_i x_i w_i, reduced as `kind` does, plus bias and residual.

    `matmul`, `matmul_reduce_scatter` and `matmul_all_reduce` are this function with
    `kind` bound.

    Args:
        kind: the class of the call.
        xs: activations, `[..., m, K_i]` each.
        ws: kernels, `[K_i, N]` each, or `[N, K_i]` if `rhs_transposed`.
        bias: `[N]`, or None.
        residual: addend of the result's shape, or None.
        rhs_transposed: whether the kernels are stored transposed.
        scale: factor of the sum, applied before bias and residual are added.
        out_dtype: dtype of the result.
        **where: the fields of `Call`, such as ranks, method and label.
    """
    call = kind(
        num_pairs=len(xs),
        rhs_transposed=rhs_transposed,
        has_bias=bias is not None,
        has_residual=residual is not None,
        scale=float(scale),
        out_dtype=np.dtype(out_dtype),
        **where,
    )
    addends = [addend for addend in (bias, residual) if addend is not None]
    return call(*xs, *ws, *addends)[0]
