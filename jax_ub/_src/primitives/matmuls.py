"""The primitives of GEMMs: local, fused with a collective, and of kernel gradients."""

import dataclasses
import functools

import jax
import numpy as np

from jax_ub._src import reference
from jax_ub._src.primitives.call import (
    Call,
    Execution,
    num_features,
    overwritten,
    rows_and_features,
)
from jax_ub._src.primitives.scales import (
    Operand,
    gathered_like,
    scales_of,
    with_f32_factors,
)
from jax_ub._src.scaled_array import values_of

_GATHER = {None: 0, "x": 1, "dy": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedMatmul(Call):
    """Base class of calls that sum products: scale * sum_i x_i w_i + bias + residual.

    Operands: all x_i [..., m, K_i], all w_i [K_i, N], then bias [N] and residual, if
    there are any. The sum is reduced over the ranks if the subclass has `reduce`, and
    rounded once.
    """

    option_names = ("num_pairs", "rhs_transposed", "has_bias", "has_residual", "scale")

    num_pairs: int
    rhs_transposed: bool
    has_bias: bool = False
    has_residual: bool = False
    scale: float = 1.0
    out_dtype: np.dtype

    @property
    def kernels(self):
        return range(self.num_pairs, 2 * self.num_pairs)

    def scales(self, operands):
        n = self.num_pairs
        return scales_of(operands[:n], operands[n : 2 * n])

    def reduce(self, partial: jax.Array) -> jax.Array:
        """Reduces f32 partial sums over the ranks. Does nothing in the base class."""
        return partial

    def shapes(self, x, *others):
        return [(self.communicated(x, *others), self.out_dtype)]

    def communicated(self, x, *others):
        w = others[self.num_pairs - 1]
        return (*x.shape[:-1], w.shape[0 if self.rhs_transposed else 1])

    def reference(self, *operands, scales=()):
        n = self.num_pairs
        xs, ws, addends = operands[:n], operands[n : 2 * n], operands[2 * n :]
        partial = reference.dots(
            xs, ws, rhs_transposed=self.rhs_transposed, scales=scales
        )
        y = reference.scaled(self.reduce(partial), self.scale)
        return [reference.add(y, *addends, out_dtype=self.out_dtype)]

    def on_one_rank(self, *operands):
        fields = {**vars(self), "execution": self.execution.on_one_rank}
        return Matmul(**fields)(*operands)

    def is_activation(self, index):
        residual = 2 * self.num_pairs + self.has_bias
        return index < self.num_pairs or (self.has_residual and index == residual)

    def global_sizes(self, operands):
        rows, width = rows_and_features(self.communicated(*operands))
        features = self.num_ranks * num_features(operands[: self.num_pairs])
        return self.op, rows, features, width


class Matmul(SummedMatmul):
    """Computes scale * sum_i x_i w_i + bias + residual, without communication."""

    op = "matmul"

    def aliases(self, operands):
        if not self.has_residual:
            return {}
        return overwritten(operands, len(operands) - 1, self.out_dtype)

    def tuned_op(self, operands):
        # The measured choice for a GEMM is an index into the list of algorithms that
        # cuBLASLt proposes. The list depends on layouts, dtypes and addends, so the
        # choice holds only for the combinations that the `tune` command measures.
        dtype = operands[0].dtype
        if self.num_pairs > 1 or self.has_bias or self.out_dtype != dtype:
            return None
        if not self.has_residual:
            return "dgrad" if self.rhs_transposed else "matmul"
        in_place = self.rhs_transposed and operands[-1].dtype == dtype
        return "dgrad_add" if in_place else None


class MatmulReduceScatter(SummedMatmul):
    """Reduce-scatters scale * sum_i x_i w_i over the ranks. Adds bias and residual.

    Bias and residual are added to this rank's rows, [..., m, N].
    """

    op = "matmul_reduce_scatter"

    def shapes(self, *operands):
        return [(self.scattered_shape(self.communicated(*operands)), self.out_dtype)]

    def reduce(self, partial):
        return reference.reduce_scatter(partial, self.axis_name)


class MatmulAllReduce(SummedMatmul):
    """All-reduces scale * sum_i x_i w_i over the ranks. Adds bias and residual.

    Bias and residual are added once, after the reduction, so they and the result are
    the same on every rank.
    """

    op = "matmul_all_reduce"
    replicates = True

    def reduce(self, partial):
        return reference.all_reduce(partial, self.axis_name)

    def is_replicated(self, index):
        return index >= 2 * self.num_pairs


def _summed_matmul(  # noqa: PLR0913, operands and options of a GEMM
    kind: type[SummedMatmul],
    execution: Execution,
    xs: tuple[Operand, ...],
    ws: tuple[Operand, ...],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    rhs_transposed: bool = False,
    scale: float = 1.0,
    out_dtype,
) -> jax.Array:
    """Computes scale * sum_i x_i w_i, summed over the ranks, plus bias and residual.

    Args:
        kind: the class of the call.
        execution: ranks, method and label.
        xs: activations, `[..., m, K_i]` each.
        ws: kernels, `[K_i, N]` each, or `[N, K_i]` if `rhs_transposed`.
        bias: `[N]`, or None.
        residual: addend of the result's shape, or None.
        rhs_transposed: whether the kernels are stored transposed.
        scale: factor of the sum, applied before bias and residual are added.
        out_dtype: dtype of the result.
    """
    call = kind(
        execution=execution,
        num_pairs=len(xs),
        rhs_transposed=rhs_transposed,
        has_bias=bias is not None,
        has_residual=residual is not None,
        scale=float(scale),
        out_dtype=np.dtype(out_dtype),
    )
    addends = [addend for addend in (bias, residual) if addend is not None]
    return call(*xs, *ws, *addends)[0]


matmul = functools.partial(_summed_matmul, Matmul)
matmul_reduce_scatter = functools.partial(_summed_matmul, MatmulReduceScatter)
matmul_all_reduce = functools.partial(_summed_matmul, MatmulAllReduce)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGatherMatmul(Call):
    """Computes y_i = scale * all_gather(x) @ w_i + bias_i + residual_i for all i.

    Operands: x, then all w_i, all bias_i and all residual_i, if there are any.
    Results: all y_i, then the gathered x and its scales of rows if `return_gathered`.
    """

    op = "all_gather_matmul"
    gathers = True
    option_names = (
        "num_kernels",
        "rhs_transposed",
        "has_bias",
        "has_residual",
        "return_gathered",
        "scale",
    )

    num_kernels: int
    rhs_transposed: bool
    has_bias: bool
    has_residual: bool
    return_gathered: bool
    scale: float
    out_dtype: np.dtype

    @property
    def kernels(self):
        return range(1, 1 + self.num_kernels)

    @property
    def _gemm(self):
        """Returns the call that multiplies the gathered x by one of the kernels."""
        return Matmul(
            execution=self.execution.on_one_rank,
            num_pairs=1,
            rhs_transposed=self.rhs_transposed,
            has_bias=self.has_bias,
            has_residual=self.has_residual,
            scale=self.scale,
            out_dtype=self.out_dtype,
        )

    def scales(self, operands):
        return scales_of(operands[:1], operands[1 : 1 + self.num_kernels])

    def shapes(self, x, *others):
        gathered = self.communicated(x)
        results = [((*gathered[:-1], n), self.out_dtype) for n in self._columns(others)]
        return results + [(gathered, x.dtype)] * self.return_gathered

    def gathered_scales(self, scales):
        return scales[:1] if self.return_gathered and self.has_row_scales else ()

    def _columns(self, kernels):
        """Returns the number of output features N_i of each kernel w_i."""
        out = 0 if self.rhs_transposed else 1
        return [w.shape[out] for w in kernels[: self.num_kernels]]

    def communicated(self, x, *others):
        return self.gathered_shape(x.shape)

    def reference(self, x, *kernels, scales=()):
        n = self.num_kernels
        gathered = reference.all_gather(x, self.axis_name)
        if self.has_row_scales:
            scales = (reference.all_gather(scales[0], self.axis_name), *scales[1:])
        ys = []
        for i in range(n):
            pair = (*scales[:1], *scales[1 + i : 2 + i])
            ys += self._gemm.reference(gathered, *kernels[i::n], scales=pair)
        if not self.return_gathered:
            return ys
        return [*ys, gathered, *self.gathered_scales(scales)]

    def on_one_rank(self, x, *kernels):
        n = self.num_kernels
        ys = [y for i in range(n) for y in self._gemm(x, *kernels[i::n])]
        if not self.return_gathered:
            return ys
        return [*ys, values_of(x), *self.gathered_scales(self.scales((x, *kernels)))]

    def aliases(self, operands):
        if not self.has_residual:
            return {}
        return overwritten(operands, len(operands) - self.num_kernels, self.out_dtype)

    def is_activation(self, index):
        # The operands are x, kernels, biases and residuals, in this order. Only x and
        # the residuals have tokens as rows.
        return index == 0 or index > self.num_kernels * (1 + self.has_bias)

    def global_sizes(self, operands):
        rows, width = rows_and_features(self.communicated(*operands))
        return self.op, rows, width, self.num_ranks * sum(self._columns(operands[1:]))


def all_gather_matmul(  # noqa: PLR0913, operands and options of a GEMM
    execution: Execution,
    x: Operand,
    ws: tuple[Operand, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residuals: tuple[jax.Array, ...] | None = None,
    *,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    scale: float = 1.0,
    out_dtype,
) -> tuple[tuple[jax.Array, ...], Operand | None]:
    """All-gathers the rows of `x`, and multiplies them by each of the kernels.

    Args:
        execution: ranks, method and label.
        x: activations, `[..., m, K]`: this rank's rows.
        ws: kernels, `[K, N_i]`, or `[N_i, K]` if `rhs_transposed`.
        biases: one `[N_i]` per kernel, or None.
        residuals: one `[..., P*m, N_i]` per kernel, overwritten by the products; or
            None.
        rhs_transposed: whether the kernels are stored transposed.
        return_gathered: whether to return the gathered `x`, too.
        scale: factor of the products, applied before bias and residual are added.
        out_dtype: dtype of the products.

    Returns:
        The products, `[..., P*m, N_i]`, and the gathered x, `[..., P*m, K]`, or None.
    """
    call = AllGatherMatmul(
        execution=execution,
        num_kernels=len(ws),
        rhs_transposed=rhs_transposed,
        has_bias=biases is not None,
        has_residual=residuals is not None,
        return_gathered=return_gathered,
        scale=float(scale),
        out_dtype=np.dtype(out_dtype),
    )
    results = call(x, *ws, *(biases or ()), *(residuals or ()))
    gathered = gathered_like(x, *results[len(ws) :]) if return_gathered else None
    return results[: len(ws)], gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgrad(Call):
    """Computes kernel gradients, dw_i = main_grad_i + scale * x^T dy_i.

    Operands: x, all dy_i, then all main_grad_i if `accumulate`. If `gather` is "x" or
    "dy", each rank has only its rows of that operand, and the call all-gathers them.
    """

    op = "wgrad"
    gathers = True
    contracts_rows = True
    option_names = ("num_outputs", "accumulate", "scale")

    num_outputs: int
    accumulate: bool
    gather: str | None = None
    scale: float = 1.0
    out_dtype: np.dtype

    def scales(self, operands):
        return scales_of(operands[: 1 + self.num_outputs])

    def shapes(self, x, *others):
        dys = others[: self.num_outputs]
        return [((x.shape[-1], dy.shape[-1]), self.out_dtype) for dy in dys]

    def communicated(self, x, *others):
        # All dy_i are concatenated along the features, and all-gathered as one array.
        sharded = (x,) if self.gather == "x" else others[: self.num_outputs]
        return self.gathered_shape((*sharded[0].shape[:-1], num_features(sharded)))

    def gathered_dtype(self, x, *others):
        return others[0].dtype if self.gather == "dy" else x.dtype

    def reference(self, x, *others, scales=()):
        dys, main_grads = others[: self.num_outputs], others[self.num_outputs :]
        x_scales, dy_scales = scales[:1], scales[1:]

        def gathered(shards):
            return tuple(reference.all_gather(each, self.axis_name) for each in shards)

        if self.gather == "x":
            (x,) = gathered((x,))
            x_scales = gathered(x_scales) if self.has_row_scales else x_scales
        if self.gather == "dy":
            dys = gathered(dys)
            dy_scales = gathered(dy_scales) if self.has_row_scales else dy_scales
        dws = []
        for i, dy in enumerate(dys):
            dw = reference.outer(x, dy, (*x_scales, *dy_scales[i : i + 1]))
            dw = reference.scaled(dw, self.scale)
            dws.append(
                reference.add(dw, *main_grads[i : i + 1], out_dtype=self.out_dtype)
            )
        return dws

    def on_one_rank(self, *operands):
        execution = self.execution.on_one_rank
        return dataclasses.replace(self, execution=execution, gather=None)(*operands)

    def options(self):
        return {**super().options(), "gather": _GATHER[self.gather]}

    def aliases(self, operands):
        return overwritten(operands, 1 + self.num_outputs, self.out_dtype)

    def global_sizes(self, operands):
        x, dys = operands[0], operands[1 : 1 + self.num_outputs]
        if self.gather is None:
            rows, features = rows_and_features(x.shape)
            return "matmul", features, rows, num_features(dys)
        rows, width = rows_and_features(self.communicated(*operands))
        others = dys if self.gather == "x" else (x,)
        return self.op, rows, width, self.num_ranks * num_features(others)

    def tuned_op(self, operands):
        if self.gather is not None:
            return self.op
        if self.num_outputs > 1:
            return None
        if self.accumulate:
            is_f32 = operands[-1].dtype == self.out_dtype == np.float32
            return "wgrad_accumulate" if is_f32 else None
        return "wgrad" if self.out_dtype == operands[0].dtype else None


def wgrad(
    execution: Execution,
    x: Operand,
    dys: tuple[Operand, ...],
    main_grads: tuple[jax.Array, ...] | None = None,
    *,
    gather: str | None = None,
    scale: float = 1.0,
    out_dtype,
) -> tuple[jax.Array, ...]:
    """Computes kernel gradients `scale * x^T dy_i`, and adds them to `main_grad_i`.

    Args:
        execution: ranks, method and label.
        x: activations, `[..., M, K]`; `[..., M/P, K]` if `gather` is "x".
        dys: gradients, `[..., M, N_i]`; `[..., M/P, N_i]` if `gather` is "dy".
        main_grads: accumulators, `[K, N_i]`, overwritten by the results; or None.
        gather: the operand to all-gather, "x" or "dy"; None gathers nothing.
        scale: factor of the products, applied before main_grad is added.
        out_dtype: dtype of the results.

    Returns:
        The kernels' gradients, `[K, N_i]` each.
    """

    def run(x, dys, main_grads, dtype):
        call = Wgrad(
            execution=execution,
            num_outputs=len(dys),
            accumulate=main_grads is not None,
            gather=gather,
            scale=float(scale),
            out_dtype=np.dtype(dtype),
        )
        return call(x, *dys, *(main_grads or ()))

    return with_f32_factors(run, x, dys, main_grads, out_dtype)
