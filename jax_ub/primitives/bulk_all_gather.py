"""Bulk AG: gathers one tensor while an independent GEMM runs."""

import dataclasses

import jax
import numpy as np

from jax_ub import reference
from jax_ub.primitives.call import Call
from jax_ub.primitives.matmul import matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class BulkAllGather(Call):
    """Operands dy_i, then w_i, then the shard; results dx and the gathered shard."""

    target = "jax_ub$bulk_all_gather"

    num_pairs: int
    partial_dtype: np.dtype = np.dtype(np.float32)

    def shapes(self, dy, *others):
        """`[..., M, K]`, and `[..., P*m, H]`."""
        w, shard = others[-2], others[-1]
        rows = shard.shape[-2] * self.num_ranks
        return [
            ((*dy.shape[:-1], w.shape[0]), self.partial_dtype),
            ((*shard.shape[:-2], rows, shard.shape[-1]), shard.dtype),
        ]

    def communicated(self, *operands):
        """All ranks' rows of the shard."""
        shard = operands[-1]
        rows = shard.shape[-2] * self.num_ranks
        return (*shard.shape[:-2], rows, shard.shape[-1])

    def reference(self, *operands):
        """`sum_i dy_i @ w_i.T`, and `all_gather(shard)`."""
        n = self.num_pairs
        dx = reference.dots(operands[:n], operands[n : 2 * n], rhs_transposed=True)
        dx = dx.astype(self.partial_dtype)
        return [dx, reference.all_gather(operands[-1], self.axis_name)]

    def on_one_rank(self, *operands):
        """The product alone: the rank's shard is all of it."""
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
        """As csrc/ffi binds them."""
        return {"num_pairs": self.num_pairs}

    def is_activation(self, index):
        """The gradients and the shard."""
        return index < self.num_pairs or index == 2 * self.num_pairs


def bulk_all_gather(
    dys: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    shard: jax.Array,
    *,
    partial_dtype=np.float32,
    **where,
) -> tuple[jax.Array, jax.Array]:
    """Gathers `shard` beside the partial dgrad.

    Args:
        dys: gradients, `[..., M, N_i]`.
        ws: kernels, `[K, N_i]`.
        shard: what is gathered, `[..., m, H]`: this rank's rows.
        partial_dtype: dtype of the partial dgrad.
        **where: the fields of `Call`: on which ranks, by which method, under what name.

    Returns:
        `sum_i dy_i w_i^T`, `[..., M, K]`, and the gathered `[..., P*m, H]`.
    """
    call = BulkAllGather(
        num_pairs=len(dys), partial_dtype=np.dtype(partial_dtype), **where
    )
    dx, gathered = call(*dys, *ws, shard)
    return dx, gathered
