"""Row-parallel and local layers: GEMM+RS, GEMM+AR or GEMM, and their gradients."""

import jax

from jax_ub._src.parallel import COLUMN, ROW
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.collectives import all_reduce
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.forward import column_forward, dgrad_config, row_forward
from jax_ub._src.rules.vjp import as_factor, differentiable, kernel_gradients
from jax_ub._src.rules.wire import all_gather
from jax_ub._src.scaled_array import is_scaled


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
    # The wgrad reuses the dy that the dgrad has gathered, unless the method reads dy
    # directly from the peers' memory.
    dgrad, config = config.dgrad, config.wgrad
    dx = gathered = None
    if ws is not None:
        product = dgrad_config(
            dgrad,
            COLUMN,
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
    # Only GEMM+AR can get a dy that is not yet summed over the ranks.
    # `scaled_gradients` sums an FP8 dy before it quantizes it.
    is_summed = config.mode.op != "matmul_all_reduce" or is_scaled(dy)
    if not is_summed and is_partial(config, dy):
        dy = all_reduce(config.collective, dy)
    dy = as_factor(dy, config.dtype)
    dx = None
    if ws is not None:
        # If all ranks have the same x, each rank computes one summand of dx from its
        # part of the kernel. GEMM+AR sums over the ranks.
        replicated = config.is_x_replicated
        product = dgrad_config(
            config.dgrad if replicated else config,
            ROW if replicated else None,
            sequence_parallel=False,
            out_dtype=config.dtype if residual is None else residual.dtype,
        )
        (dx,), _ = row_forward(product, dy, ws, residual=residual)
    if x is None:
        return dx, ()
    return dx, kernel_gradients(config, config.local, x, (dy,), main_grads)


def is_partial(config: CallConfig, dy: jax.Array) -> bool:
    """Returns whether dy, the cotangent of a sum over ranks, must be summed, too.

    With `shard_map(check_vma=True)`, dy is partial if its type varies over the ranks.
    This happens inside a fused operation if the result is added to a varying array.
    With `check_vma=False`, dy is always partial: JAX transposes psum to psum.
    """
    own = frozenset(config.axis_name)
    return not config.is_vma_checked or bool(own & vma.axes_of(dy))


row_linear = differentiable(row_forward, row_gradients)
