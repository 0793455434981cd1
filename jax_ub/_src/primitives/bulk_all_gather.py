"""The primitive that all-gathers an array while the GEMMs of a dgrad run.

The GEMMs do not depend on the gathered array.
"""

import dataclasses

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import Call
from jax_ub._src.primitives.matmul import matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkAllGather(Call):
    """Computes dx = sum_i dy_i w_i^T while it all-gathers an unrelated array.

    Operands: all dy_i, all w_i, then this rank's shard of the other tensor. Results:
    dx, then the gathered tensor.
    """

    target = "jax_ub$bulk_all_gather"

    num_pairs: int
    partial_dtype: np.dtype = np.dtype(np.float32)

    def shapes(self, dy, *others):
        """Returns the shapes of dx, `[..., M, K]`, and the gathered `[..., P*m, H]`."""
        w, shard = others[-2], others[-1]
        rows = shard.shape[-2] * self.num_ranks
        return [
            ((*dy.shape[:-1], w.shape[0]), self.partial_dtype),
            ((*shard.shape[:-2], rows, shard.shape[-1]), shard.dtype),
        ]

    def communicated(self, *operands):
        """Returns the shape of the gathered array, `[..., P*m, H]`."""
        shard = operands[-1]
        rows = shard.shape[-2] * self.num_ranks
        return (*shard.shape[:-2], rows, shard.shape[-1])

    def reference(self, *operands):
        """Computes dx by plain dot products and the other array by an all-gather."""
        n = self.num_pairs
        dx = reference.dots(operands[:n], operands[n : 2 * n], rhs_transposed=True)
        dx = dx.astype(self.partial_dtype)
        return [dx, reference.all_gather(operands[-1], self.axis_name)]

    def on_one_rank(self, *operands):
        """Computes dx by local GEMMs; the shard of a single rank is the whole array."""
        n = self.num_pairs
        dx = matmul(
            operands[:n],
            operands[n : 2 * n],
            None,
            None,
            rhs_transposed=True,
            out_dtype=self.partial_dtype,
            **self.local,
        )
        return [dx, operands[-1]]

    def options(self):
        """Returns the FFI attributes of this target, which csrc/ffi decodes."""
        return {"num_pairs": self.num_pairs}

    def is_activation(self, index):
        """Returns whether operand `index` is a dy_i or the shard to gather."""
        return index < self.num_pairs or index == 2 * self.num_pairs


def bulk_all_gather(
    dys: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    shard: jax.Array,
    *,
    partial_dtype=np.float32,
    **where,
) -> tuple[jax.Array, jax.Array]:
    """All-gathers `shard` while the GEMMs of a layer's dgrad run.

    Args:
        dys: gradients, `[..., M, N_i]`.
        ws: kernels, `[K, N_i]`.
        shard: this rank's rows of the tensor to gather, `[..., m, H]`.
        partial_dtype: dtype of the partial dgrad.
        **where: the fields of `Call`, such as ranks, method and label.

    Returns:
        `sum_i dy_i w_i^T`, `[..., M, K]`, and the gathered `[..., P*m, H]`.
    """
    call = BulkAllGather(
        num_pairs=len(dys), partial_dtype=np.dtype(partial_dtype), **where
    )
    dx, gathered = call(*dys, *ws, shard)
    return dx, gathered
