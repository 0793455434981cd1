"""What the targets that sum several products have in common.

Operands are x_i, then w_i, then bias and residual where there are; the result is
scale * sum_i x_i w_i, reduced over the ranks or not, plus bias and residual, rounded
once.
"""

import dataclasses

import jax
import numpy as np

from jax_ub import reference
from jax_ub.primitives.call import Call


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedMatmul(Call):
    """A call whose result is a sum of products; a subclass says what reduces it."""

    num_pairs: int
    rhs_transposed: bool
    has_bias: bool
    has_residual: bool
    scale: float = 1.0
    out_dtype: np.dtype

    def plain(self, kind: "type[SummedMatmul]", operands) -> jax.Array:
        """The same product of one rank by a `kind` that communicates nothing."""
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
        """How many rows the result has where the operands have `rows`."""
        return rows

    def reduce(self, partial: jax.Array) -> jax.Array:
        """Reduces the f32 product over the ranks."""
        return partial

    def shapes(self, x, *others):
        """`[..., rows, N]`."""
        w = others[self.num_pairs - 1]
        columns = w.shape[0 if self.rhs_transposed else 1]
        rows = self.reduced_rows(x.shape[-2])
        return [((*x.shape[:-2], rows, columns), self.out_dtype)]

    def communicated(self, x, *others):
        """The sum of the products, before it is reduced."""
        w = others[self.num_pairs - 1]
        return (*x.shape[:-1], w.shape[0 if self.rhs_transposed else 1])

    def reference(self, *operands):
        """The sum of the products, reduced, plus the addends."""
        n = self.num_pairs
        xs, ws, addends = operands[:n], operands[n : 2 * n], operands[2 * n :]
        partial = reference.dots(xs, ws, rhs_transposed=self.rhs_transposed)
        y = reference.scaled(self.reduce(partial), self.scale)
        return [reference.add(y, *addends, out_dtype=self.out_dtype)]

    def options(self):
        """As csrc/ffi binds them."""
        return {
            "num_pairs": self.num_pairs,
            "rhs_transposed": self.rhs_transposed,
            "has_bias": self.has_bias,
            "has_residual": self.has_residual,
            "scale": np.float32(self.scale),
        }

    def is_activation(self, index):
        """The factors x_i and the residual."""
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
    """Makes and runs a call of `kind`; see the functions of its name."""
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
