"""The primitives of collectives, alone or concurrent with an independent GEMM."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jax_ub._src import reference
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives import mesh, vma
from jax_ub._src.primitives.call import Call, Execution, num_features
from jax_ub._src.primitives.matmuls import Matmul, Wgrad
from jax_ub._src.primitives.scales import (
    Operand,
    packed,
    unpacked,
    with_f32_factors,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Call):
    """All-gathers the rows of x over P ranks: [..., m, K] -> [..., P*m, K]."""

    op = "all_gather"
    gathers = True
    communicates_only = True

    num_scale_features: int = 0  # features that are scales, see `packed`

    def shapes(self, x):
        return [(self.gathered_shape(x.shape), x.dtype)]

    def communicated(self, x):
        *rows, width = self.gathered_shape(x.shape)
        return (*rows, width - self.num_scale_features)

    def on_one_rank(self, x):
        return [x]

    def reference(self, x, *, scales=()):
        return [reference.all_gather(x, self.axis_name)]


def all_gather(execution: Execution, x: Operand) -> Operand:
    """All-gathers the rows of `x` over P ranks: `[..., m, K]` -> `[..., P*m, K]`."""
    rows, num_scale_features = packed(x)
    call = AllGather(execution=execution, num_scale_features=num_scale_features)
    return unpacked(x, call(rows)[0])


class AllGatherMaxima(AllGather):
    """All-gathers small arrays, so that `all_reduce_max` can compute their maximum."""

    is_auxiliary = True


def all_reduce_max(execution: Execution, x: jax.Array) -> jax.Array:
    """Returns the elementwise maximum of a small array over the ranks.

    On CPUs the engine all-gathers the array, because XLA's all-reduce takes several
    times as long. `jax.lax.pmax` computes the maximum on GPUs, with method "xla", over
    axes of `jax.vmap` and on meshes with automatic axes.
    """
    axes = execution.axis_name
    if execution.choice.method is Method.XLA or not mesh.is_fully_manual(axes):
        return lax.pmax(x, axes)
    call = AllGatherMaxima(
        execution=Execution(
            # The layer may all-gather an operand, too. The label distinguishes the two
            # all-gathers.
            label=f"FP8 scale of {execution.label}",
            choice=MethodChoice(Method.AUTO),
            axis_name=axes,
            num_ranks=execution.num_ranks,
        )
    )

    def by_engine(x):
        with jax.named_scope("all_reduce_max"):  # names the call in profiles
            largest = jnp.max(call(x.reshape(1, -1))[0], axis=0)
        return vma.pcast_replicated(largest, axes).reshape(x.shape)

    return lax.platform_dependent(x, cpu=by_engine, default=lambda x: lax.pmax(x, axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(Call):
    """Reduce-scatters the rows of x over P ranks: [..., P*m, K] -> [..., m, K].

    Sums are computed in f32, in rank order, and rounded once.
    """

    op = "reduce_scatter"
    communicates_only = True

    out_dtype: np.dtype

    def shapes(self, x):
        return [(self.scattered_shape(x.shape), self.out_dtype)]

    def communicated(self, x):
        return x.shape

    def on_one_rank(self, x):
        return [x.astype(self.out_dtype)]

    def reference(self, x, *, scales=()):
        return [reference.reduce_scatter(x, self.axis_name).astype(self.out_dtype)]


def reduce_scatter(execution: Execution, x: jax.Array, *, out_dtype) -> jax.Array:
    """Reduce-scatters the rows of x over P ranks: `[..., P*m, K]` -> `[..., m, K]`."""
    return ReduceScatter(execution=execution, out_dtype=np.dtype(out_dtype))(x)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Call):
    """Sums x over the ranks, adds bias and residual, and rounds once. x has any shape.

    Operands: x, then bias [N] and residual, if there are any. All terms are added in
    f32, x in rank order. Bias and residual are the same on every rank.
    """

    op = "all_reduce"
    communicates_only = True
    replicates = True
    option_names = ("has_bias", "has_residual")

    has_bias: bool
    has_residual: bool

    def shapes(self, x, *addends):
        return [(x.shape, x.dtype)]

    def communicated(self, x, *addends):
        return x.shape

    def on_one_rank(self, x, *addends):
        partial = x.astype(reference.sum_dtype(x.dtype))
        return [reference.add(partial, *addends, out_dtype=x.dtype)]

    def reference(self, x, *addends, scales=()):
        partial = reference.all_reduce(x, self.axis_name)
        return [reference.add(partial, *addends, out_dtype=x.dtype)]

    def is_activation(self, index):
        return index == 0 or (self.has_residual and index == 1 + self.has_bias)

    def is_replicated(self, index):
        return index > 0


def all_reduce(
    execution: Execution,
    x: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Sums `x` over the ranks, and adds an optional bias and residual once.

    Args:
        execution: ranks, method and label.
        x: this rank's summand, `[..., N]` of any rank.
        bias: `[N]`, or None.
        residual: addend of the shape of `x`, or None.
    """
    call = AllReduce(
        execution=execution,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    return call(x, *(a for a in (bias, residual) if a is not None))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bulk(Call):
    """Base class of collectives that run concurrently with independent local GEMMs.

    The operands are those of `gemm`, followed by the array of `collective`. The results
    have the same order.
    """

    gemm: Matmul | Wgrad
    collective: AllGather | ReduceScatter

    def scales(self, operands):
        return self.gemm.scales(operands)

    def shapes(self, *operands):
        *factors, x = operands
        return self.gemm.shapes(*factors) + self.collective.shapes(x)

    def communicated(self, *operands):
        return self.collective.communicated(operands[-1])

    def gathered_dtype(self, *operands):
        return self.collective.gathered_dtype(operands[-1])

    def reference(self, *operands, scales=()):
        *factors, x = operands
        results = self.gemm.reference(*factors, scales=scales)
        return [*results, *self.collective.reference(x)]

    def on_one_rank(self, *operands):
        *factors, x = operands
        return [*self.gemm(*factors), *self.collective.on_one_rank(x)]

    def aliases(self, operands):
        return self.gemm.aliases(operands[:-1])

    def global_sizes(self, operands):
        op, rows, width, _ = super().global_sizes(operands)
        features = num_features(operands[self.dys])
        return op, rows, width, self.num_ranks * features

    @property
    def dys(self) -> slice:
        """Returns the indices of the operands that are gradients of results, dy_i."""
        raise NotImplementedError


class BulkAllGather(Bulk):
    """Computes dx = sum_i dy_i w_i^T and concurrently all-gathers another array.

    Operands: all dy_i, all w_i, then this rank's shard of the other tensor. Results:
    dx, then the gathered tensor.
    """

    op = "bulk_all_gather"
    gemm: Matmul

    @property
    def dys(self):
        return slice(self.gemm.num_pairs)

    def options(self):
        return {**super().options(), "num_pairs": self.gemm.num_pairs}

    def is_activation(self, index):
        is_shard = index == 2 * self.gemm.num_pairs
        return is_shard or self.gemm.is_activation(index)


def bulk_all_gather(
    execution: Execution,
    dys: tuple[Operand, ...],
    ws: tuple[Operand, ...],
    shard: Operand,
    *,
    partial_dtype=np.float32,
) -> tuple[jax.Array, Operand]:
    """All-gathers `shard` concurrently with the GEMMs of a layer's dgrad.

    Args:
        execution: ranks, method and label.
        dys: gradients, `[..., M, N_i]`.
        ws: kernels, `[K, N_i]`.
        shard: this rank's rows of the tensor to gather, `[..., m, H]`.
        partial_dtype: dtype of the partial dgrad.

    Returns:
        `sum_i dy_i w_i^T`, `[..., M, K]`, and the gathered `[..., P*m, H]`.
    """
    rows, num_scale_features = packed(shard)
    call = BulkAllGather(
        execution=execution,
        gemm=Matmul(
            execution=execution.on_one_rank,
            num_pairs=len(dys),
            rhs_transposed=True,
            out_dtype=np.dtype(partial_dtype),
        ),
        collective=AllGather(
            execution=execution, num_scale_features=num_scale_features
        ),
    )
    dx, gathered = call(*dys, *ws, rows)
    return dx, unpacked(shard, gathered)


class BulkReduceScatter(Bulk):
    """Computes dw_i = main_grad_i + x^T dy_i and concurrently reduce-scatters an array.

    Operands: x, all dy_i, all main_grad_i if there are any, then this rank's summand of
    the other tensor. Results: all dw_i, then this rank's rows of the sum.
    """

    op = "bulk_reduce_scatter"
    contracts_rows = True
    gemm: Wgrad

    @property
    def dys(self):
        return slice(1, 1 + self.gemm.num_outputs)

    def options(self):
        return {
            **super().options(),
            "num_outputs": self.gemm.num_outputs,
            "accumulate": self.gemm.accumulate,
        }


def bulk_reduce_scatter(
    execution: Execution,
    x: Operand,
    dys: tuple[Operand, ...],
    main_grads: tuple[jax.Array, ...] | None,
    partial: jax.Array,
    *,
    dw_dtype,
    scattered_dtype,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Reduce-scatters `partial` concurrently with the GEMMs of a layer's wgrad.

    Args:
        execution: ranks, method and label.
        x: gathered activations, `[..., M, K]`.
        dys: gradients, `[..., M, N_i]`.
        main_grads: accumulators, `[K, N_i]`, overwritten by the results; or None.
        partial: this rank's summand, `[..., P*m, H]`.
        dw_dtype: dtype of the kernels' gradients.
        scattered_dtype: dtype of the scattered sum.

    Returns:
        The kernels' gradients, `[K, N_i]` each, and this rank's rows of the sum,
        `[..., m, H]`.
    """

    def run(x, dys, main_grads, dtype):
        call = BulkReduceScatter(
            execution=execution,
            gemm=Wgrad(
                execution=execution.on_one_rank,
                num_outputs=len(dys),
                accumulate=main_grads is not None,
                out_dtype=np.dtype(dtype),
            ),
            collective=ReduceScatter(
                execution=execution, out_dtype=np.dtype(scattered_dtype)
            ),
        )
        return call(x, *dys, *(main_grads or ()), partial)

    *dws, scattered = with_f32_factors(run, x, dys, main_grads, dw_dtype)
    return tuple(dws), scattered


# This module and `matmuls`, which it imports, define all ops.
def _names_of_primitives(kind):
    own = [kind.primitive.name] if "op" in vars(kind) else []
    return sum(map(_names_of_primitives, kind.__subclasses__()), own)


# Value for the argument `disabled_checks` of jax.export.export, which by default
# rejects custom calls that JAX does not know to be stable. A process that only loads an
# exported or compiled program must call ub.register_targets() first.
export_safety_checks = tuple(
    map(export.DisabledSafetyCheck.custom_call, sorted(_names_of_primitives(Call)))
)
