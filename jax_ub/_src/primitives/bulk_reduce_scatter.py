"""The primitive that reduce-scatters an array while the GEMMs of a wgrad run.

The GEMMs do not depend on the reduced array.
"""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call
from jax_ub._src.primitives.wgrad import wgrad


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkReduceScatter(Call):
    """Computes dw_i = main_grad_i + x^T dy_i while it reduce-scatters another array.

    Operands: x, all dy_i, all main_grad_i if `accumulate`, then `partial`, this rank's
    summand of the other tensor. Results: all dw_i, then this rank's rows of the sum.
    """

    target = "jax_ub$bulk_reduce_scatter"

    num_outputs: int
    accumulate: bool
    dw_dtype: np.dtype
    scattered_dtype: np.dtype

    def shapes(self, x, *others):
        """Returns the shapes of all dw_i, `[K, N_i]`, and of the sum, `[..., m, H]`."""
        dys, partial = others[: self.num_outputs], others[-1]
        rows = partial.shape[-2] // self.num_ranks
        scattered = (*partial.shape[:-2], rows, partial.shape[-1])
        dws = [((x.shape[-1], dy.shape[-1]), self.dw_dtype) for dy in dys]
        return [*dws, (scattered, self.scattered_dtype)]

    def communicated(self, *operands):
        """Returns the shape of `partial`, the array that is reduce-scattered."""
        return operands[-1].shape

    def reference(self, x, *others):
        """Computes dw_i by plain dot products and the sum by `jax.lax.psum_scatter`."""
        n = self.num_outputs
        dys, main_grads, partial = others[:n], others[n:-1], others[-1]
        dws = [
            reference.add(reference.outer(x, dy), main_grad, out_dtype=self.dw_dtype)
            for dy, main_grad in zip(dys, main_grads or [None] * n, strict=True)
        ]
        scattered = reference.reduce_scatter(partial, self.axis_name)
        return [*dws, scattered.astype(self.scattered_dtype)]

    def on_one_rank(self, x, *others):
        """Computes the dw_i by local GEMMs; a single rank's summand is the sum."""
        n = self.num_outputs
        dws = wgrad(
            x,
            others[:n],
            others[n:-1] or None,
            out_dtype=self.dw_dtype,
            **self.local,
        )
        return [*dws, others[-1].astype(self.scattered_dtype)]

    def options(self):
        """Returns the FFI attributes of this target, which csrc/ffi decodes."""
        return {"num_outputs": self.num_outputs, "accumulate": self.accumulate}

    def aliases(self, operands):
        """Lets dw_i overwrite main_grad_i, if both have the same dtype."""
        first = 1 + self.num_outputs
        return {
            first + i: i
            for i, main_grad in enumerate(operands[first:-1])
            if main_grad.dtype == self.dw_dtype
        }

    @property
    def is_batchable(self):
        """Returns False, because dw_i is summed over batch axes and so has none."""
        return False


def bulk_reduce_scatter(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    main_grads: tuple[jax.Array, ...] | None,
    partial: jax.Array,
    *,
    dw_dtype,
    scattered_dtype,
    **where,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Reduce-scatters `partial` while the GEMMs of a layer's wgrad run.

    Args:
        x: gathered activations, `[..., M, K]`.
        dys: gradients, `[..., M, N_i]`.
        main_grads: accumulators, `[K, N_i]`, overwritten by the results; or None.
        partial: this rank's summand, `[..., P*m, H]`.
        dw_dtype: dtype of the kernels' gradients.
        scattered_dtype: dtype of the scattered sum.
        **where: the fields of `Call`, such as ranks, method and label.

    Returns:
        The kernels' gradients, `[K, N_i]` each, and this rank's rows of the sum,
        `[..., m, H]`.
    """
    call = BulkReduceScatter(
        num_outputs=len(dys),
        accumulate=main_grads is not None,
        dw_dtype=np.dtype(dw_dtype),
        scattered_dtype=np.dtype(scattered_dtype),
        **where,
    )
    *dws, scattered = call(x, *dys, *(main_grads or ()), partial)
    return tuple(dws), scattered
