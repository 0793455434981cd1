"""The primitive that all-gathers the rows of x and multiplies them by kernels."""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call
from jax_ub._src.primitives.matmul import matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGatherMatmul(Call):
    """Computes y_i = scale * all_gather(x) @ w_i + bias_i + residual_i for kernels w_i.

    Operands: x, then all w_i, all bias_i and all residual_i, if there are any.
    Results: all y_i, then the gathered x if `return_gathered`.
    """

    target = "jax_ub$all_gather_matmul"

    num_kernels: int
    rhs_transposed: bool
    has_bias: bool
    has_residual: bool
    return_gathered: bool
    scale: float
    out_dtype: np.dtype

    def shapes(self, x, *kernels):
        """Returns the shapes of all y_i, `[..., P*m, N_i]`, and of the gathered x.

        The gathered x, `[..., P*m, K]`, is a result only on request.
        """
        rows = (*x.shape[:-2], x.shape[-2] * self.num_ranks)
        out = 0 if self.rhs_transposed else 1
        results = [
            ((*rows, w.shape[out]), self.out_dtype) for w in kernels[: self.num_kernels]
        ]
        gathered = [((*rows, x.shape[-1]), x.dtype)] if self.return_gathered else []
        return results + gathered

    def communicated(self, x, *others):
        """Returns the shape of x after the all-gather, `[..., P*m, K]`."""
        return (*x.shape[:-2], x.shape[-2] * self.num_ranks, x.shape[-1])

    def reference(self, x, *kernels):
        """Computes each y_i by `jax.lax.all_gather` and a plain dot product."""
        n = self.num_kernels
        gathered = reference.all_gather(x, self.axis_name)
        ys = []
        for i, w in enumerate(kernels[:n]):
            y = reference.dot(gathered, w, rhs_transposed=self.rhs_transposed)
            addends = kernels[n + i :: n]
            y = reference.scaled(y, self.scale)
            ys.append(reference.add(y, *addends, out_dtype=self.out_dtype))
        return [*ys, gathered] if self.return_gathered else ys

    def on_one_rank(self, x, *kernels):
        """Computes each y_i by a local GEMM, because a single rank has all rows."""
        n = self.num_kernels
        ys = []
        for i, w in enumerate(kernels[:n]):
            addends = iter(kernels[n + i :: n])
            y = matmul(
                (x,),
                (w,),
                next(addends) if self.has_bias else None,
                next(addends) if self.has_residual else None,
                rhs_transposed=self.rhs_transposed,
                scale=self.scale,
                out_dtype=self.out_dtype,
                **self.local,
            )
            ys.append(y)
        return [*ys, x] if self.return_gathered else ys

    def options(self):
        """Returns the FFI attributes of this target, which csrc/ffi decodes."""
        return {
            "num_kernels": self.num_kernels,
            "rhs_transposed": self.rhs_transposed,
            "has_bias": self.has_bias,
            "has_residual": self.has_residual,
            "return_gathered": self.return_gathered,
            "scale": np.float32(self.scale),
        }

    def aliases(self, operands):
        """Lets y_i overwrite residual_i, if both have the same dtype."""
        if not self.has_residual:
            return {}
        first = len(operands) - self.num_kernels
        return {
            first + i: i
            for i, residual in enumerate(operands[first:])
            if residual.dtype == self.out_dtype
        }

    def is_activation(self, index):
        """Returns whether operand `index` is x or a residual, which have rows."""
        behind_biases = 1 + self.num_kernels * (2 if self.has_bias else 1)
        return index == 0 or index >= behind_biases

    @property
    def gathers(self):
        """Returns True, because this call's collective is an all-gather."""
        return True


def all_gather_matmul(
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...] | None,
    residuals: tuple[jax.Array, ...] | None = None,
    *,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    scale: float = 1.0,
    out_dtype,
    **where,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """All-gathers the rows of `x`, and multiplies them by each of the kernels.

    Args:
        x: activations, `[..., m, K]`: this rank's rows.
        ws: kernels, `[K, N_i]`, or `[N_i, K]` if `rhs_transposed`.
        biases: one `[N_i]` per kernel, or None.
        residuals: one `[..., P*m, N_i]` per kernel, overwritten by the products; or
            None.
        rhs_transposed: whether the kernels are stored transposed.
        return_gathered: whether to return the gathered `x`, too.
        scale: factor of the products, applied before bias and residual are added.
        out_dtype: dtype of the products.
        **where: the fields of `Call`, such as ranks, method and label.

    Returns:
        The products, `[..., P*m, N_i]`, and the gathered x, `[..., P*m, K]`, or None.
    """
    call = AllGatherMatmul(
        num_kernels=len(ws),
        rhs_transposed=rhs_transposed,
        has_bias=biases is not None,
        has_residual=residuals is not None,
        return_gathered=return_gathered,
        scale=float(scale),
        out_dtype=np.dtype(out_dtype),
        **where,
    )
    results = call(x, *ws, *(biases or ()), *(residuals or ()))
    return results[: len(ws)], results[len(ws)] if return_gathered else None
