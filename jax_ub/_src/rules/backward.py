"""Gradients of linear layers: column-parallel, row-parallel and local ones."""

import dataclasses
import math

import jax

from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.methods import Method
from jax_ub._src.parallel import COLUMN, ROW, ParallelMode, mode_of
from jax_ub._src.primitives.collectives import all_reduce, bulk_reduce_scatter
from jax_ub._src.primitives.matmuls import matmul
from jax_ub._src.reference import add, sum_dtype
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.forward import (
    all_gather,
    bulk_all_gather,
    column_forward,
    reduce_scatter,
    row_forward,
)
from jax_ub._src.rules.vjp import (
    accumulation,
    as_factor,
    differentiable,
    is_zero,
    kernel_gradients,
)
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS
from jax_ub._src.scaled_array import is_scaled


def column_gradients(
    config: CallConfig,
    saved: dict,
    dys: dict[int, jax.Array],
    d_gathered=None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """Computes the gradients of x and of each w_i, for `y_i = all_gather(x) @ w_i`.

    Args:
        config: the configuration of the layer.
        saved: see `vjp.differentiable`.
        dys: gradients `[..., M, N_i]` by the index i of the result; results whose
            gradient is zero are left out.
        d_gathered: gradient of the gathered x, `[..., M, K]`, or a symbolic zero.
        residual: addend of the gradient of x, `[..., M/P, K]`, or None. The sum has the
            residual's dtype.

    Returns:
        The gradient of x, `[..., M/P, K]` or None, and the gradients of the kernels,
        `[K, N_i]` by index i.
    """
    config = config.dgrad
    x, gathered = saved["x"], saved["gathered"]
    ws, main_grads = (
        None if saved[name] is None else tuple(saved[name][i] for i in dys)
        for name in ("ws", "main_grads")
    )
    gradients = tuple(as_factor(dy, config.dtype) for dy in dys.values())
    if not dys:
        return _scattered(config, ws, d_gathered, config.dtype), {}
    _check_bulk(config)
    # The bulk primitive, which all-gathers x during the dgrad GEMM, requires kernels in
    # [in, out] layout.
    may_be_bulk = config.overlap and ws is not None and not config.rhs_transposed
    if may_be_bulk and x is not None:
        M, N = math.prod(gradients[0].shape[:-1]), sum(dy.shape[-1] for dy in gradients)
        sizes = M, x.shape[-1], N * config.num_ranks
        config = config.with_tuned_method(COLUMN_GRADIENTS, *sizes)
        is_bulk = config.uses_bulk
    else:
        # If the forward pass has saved the gathered x, the backward pass has no
        # all-gather that could overlap with the dgrad GEMM. Method "auto" then does not
        # select "bulk".
        is_bulk = may_be_bulk and gathered is not None and config.method is Method.BULK
    # dx stays in f32 until the residual is added, so that the sum is rounded once.
    config = dataclasses.replace(
        config,
        out_dtype=config.dtype if residual is None else sum_dtype(config.dtype),
    )
    if is_bulk:
        dx, dws = _column_bulk(
            config, x, gathered, gradients, ws, main_grads, d_gathered
        )
    else:
        dx = _column_dgrad(config, gradients, ws, d_gathered)
        dws = _column_wgrad(config, x, gathered, gradients, main_grads)
    if residual is not None and dx is not None:
        dx = add(dx, residual, out_dtype=residual.dtype)
    return dx, dict(zip(dys, dws, strict=False))


def _check_bulk(config):
    """Raises an error if method "bulk" was requested for kernels stored as [out, in].

    If "bulk" is only the default of a name, the gradients run without it.
    """
    is_explicit = config.method is Method.BULK and config.choice.is_explicit
    if is_explicit and config.rhs_transposed:
        raise UnsupportedOverlapError(
            f'{config.label}: method "bulk" of the dgrad needs a kernel [in, out], but '
            "rhs_transposed = True. Pass the kernel [in, out], or configure another "
            'method, for example "ring_exchange".'
        )


def _scattered(config, ws, d_gathered, dtype):
    if ws is None or is_zero(d_gathered):
        return None
    return reduce_scatter(config.collective, d_gathered, out_dtype=dtype)


def _column_dgrad(config, dys, ws, d_gathered):
    if ws is None:
        return None
    residual = _scattered(config, ws, d_gathered, sum_dtype(config.dtype))
    product = dgrad_config(config, mode_of(ROW, True))
    (dx,), _ = row_forward(product, dys, ws, residual=residual)
    return dx


def _column_wgrad(config, x, gathered, dys, main_grads):
    if gathered is None and x is None:
        return ()
    is_one = len(dys) == 1 or not config.rhs_transposed
    if gathered is None and (config.gathers_first or not is_one):
        gathered = all_gather(config.collective, x)
    if gathered is None:
        return kernel_gradients(config, config.overlapped, x, dys, main_grads, "x")
    return kernel_gradients(config, config.local, gathered, dys, main_grads)


def _column_bulk(config, x, gathered, dys, ws, main_grads, d_gathered):
    # The all-gather of x overlaps with the dgrad GEMM (dy w^T). The reduce-scatter of
    # the partial sums of this GEMM then overlaps with the wgrad GEMM (x^T dy). A wgrad
    # without a configured method has the method of the dgrad, which may come from a
    # file that the `tune` command wrote.
    wgrad_config = config if config.wgrad_choice is None else config.wgrad
    dtype = config.partial_dtype(len(dys))
    if gathered is None:
        partial, gathered = bulk_all_gather(
            config.bulk, dys, ws, x, partial_dtype=dtype
        )
    else:
        partial = matmul(config.local, dys, ws, rhs_transposed=True, out_dtype=dtype)
    if not is_zero(d_gathered):
        partial += d_gathered.astype(dtype)
    main_grads, dtype = accumulation(config, dys, main_grads)
    dws, dx = bulk_reduce_scatter(
        wgrad_config.bulk,
        gathered,
        dys,
        main_grads,
        partial,
        dw_dtype=dtype,
        scattered_dtype=config.out_dtype,
    )
    return dx, dws


def row_gradients(
    config: CallConfig,
    saved: dict,
    dys: dict[int, jax.Array],
    d_gathered: None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """Computes the gradients of x and w for a row-parallel or local layer `y = x @ w`.

    Args:
        config: the configuration of the layer.
        saved: see `vjp.differentiable`.
        dys: the gradient of the result, `[..., M/P, N]` after a reduce-scatter, else
            `[..., M, N]`; empty if it is zero.
        d_gathered: None: the forward pass gathers nothing.
        residual: addend of the gradient of x, or None. The sum has the residual's
            dtype and overwrites its buffer. Not for a replicated x.

    Returns:
        The gradient of x or None, and {0: the gradient of the kernel} or {}.
    """
    if not dys:
        return None, {}
    x, main_grads = saved["x"], saved["main_grads"]
    ws, dy = saved["ws"], dys[0]
    if x is None and ws is None:
        return None, {}
    if config.mode.op == "matmul_reduce_scatter":
        dx, dws = _gathering_gradients(config, x, ws, dy, main_grads, residual)
    else:
        dx, dws = _local_gradients(config, x, ws, dy, main_grads, residual)
    return dx, dict(enumerate(dws))


def _gathering_gradients(config, x, ws, dy, main_grads, residual):
    dy = as_factor(dy, config.dtype)
    # The dgrad all-gathers dy, and the wgrad uses the result again. Methods that read
    # dy directly from the peers' memory store no gathered dy.
    dgrad, config = config.dgrad, config.wgrad
    dx = gathered = None
    if ws is not None:
        product = dgrad_config(
            dgrad,
            mode_of(COLUMN, True),
            out_dtype=config.dtype if residual is None else residual.dtype,
            returns_gathered=x is not None and dgrad.materializes_gather,
        )
        (dx,), gathered = column_forward(product, dy, ws, residual=residual)
    if x is None:
        return dx, ()
    if gathered is None and config.gathers_first:
        gathered = all_gather(config.collective, dy)
    if gathered is None:
        execution = config.overlapped
        return dx, kernel_gradients(config, execution, x, (dy,), main_grads, "dy")
    return dx, kernel_gradients(config, config.local, x, (gathered,), main_grads)


def _local_gradients(config, x, ws, dy, main_grads, residual):
    # If y was all-reduced, dy may be a partial sum, which must be summed over the
    # ranks. An FP8 dy is a complete sum: `scaled_gradients` sums dy before it quantizes
    # the sum.
    is_summed = config.mode.op != "matmul_all_reduce" or is_scaled(dy)
    if not is_summed and is_partial(config, dy):
        dy = all_reduce(config.collective, dy)
    dy = as_factor(dy, config.dtype)
    dx = None
    if ws is not None:
        # If all ranks have the same x, each rank computes a partial sum of dx from its
        # shard of the kernel. A GEMM with an all-reduce adds the partial sums of all
        # ranks.
        replicated = config.is_x_replicated
        product = dgrad_config(
            config.dgrad if replicated else config,
            mode_of(ROW if replicated else None, False),
            out_dtype=config.dtype if residual is None else residual.dtype,
        )
        (dx,), _ = row_forward(product, dy, ws, residual=residual)
    if x is None:
        return dx, ()
    return dx, kernel_gradients(config, config.local, x, (dy,), main_grads)


def dgrad_config(config: CallConfig, mode: ParallelMode, **fields) -> CallConfig:
    """Returns the settings to run a dgrad as a forward pass with transposed kernels.

    `mode` is the parallel mode of this forward pass. `fields` replace other settings.
    """
    return dataclasses.replace(
        config, mode=mode, rhs_transposed=not config.rhs_transposed, **fields
    )


def is_partial(config: CallConfig, dy: jax.Array) -> bool:
    """Returns whether the gradient dy of an all-reduced y is a partial sum.

    With `shard_map(check_vma=True)`, dy is partial if its type varies over the ranks.
    This happens inside a fused operation if the result is added to a varying array.
    With `check_vma=False`, dy is always partial: JAX transposes psum to psum.
    """
    return not config.is_vma_checked or bool(config.varying(dy))


column_linear = differentiable(column_forward, column_gradients)
row_linear = differentiable(row_forward, row_gradients)
