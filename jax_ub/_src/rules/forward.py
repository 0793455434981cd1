"""Computes products of linear layers: AG+GEMM, GEMM+RS, GEMM+AR and GEMM alone.

A layer's forward pass is one of them, and its dgrad is another one, with transposed
kernels. With `config.overlap`, the GEMM and its collective are one primitive. Without,
they are two primitives, which run one after the other.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from jax_ub._src import checks, lowering_log, reference
from jax_ub._src.parallel import mode_of
from jax_ub._src.primitives import matmuls, vma
from jax_ub._src.primitives.collectives import all_gather, all_reduce, reduce_scatter
from jax_ub._src.primitives.scales import Operand
from jax_ub._src.rules import wire
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.vjp import check_no_main_grad, mapped_together
from jax_ub._src.scaled_array import is_scaled


def forward_of(config: CallConfig) -> Callable[..., Any]:
    """Returns `column_forward` for a layer that all-gathers x, else `row_forward`."""
    return column_forward if config.mode.gathers_x else row_forward


def with_f64_fallback(
    config: CallConfig, x: Any
) -> tuple[CallConfig, AbstractContextManager[Any]]:
    """Selects plain `jax.lax` if x is f64, because the engine has no f64 GEMM.

    An explicit method is kept.

    Returns:
        The layer's settings, and a context manager that records the fallback, if any.
    """
    is_f64 = checks.is_array(x) and checks.is_f64(x)
    if is_f64 and config.may_fall_back and not config.takes_f64:
        return config.plain, lowering_log.falling_back(config.label, "x is float64")
    return config, contextlib.nullcontext()


def is_differentiated_by_jax(config: CallConfig, operands: Any, main_grads) -> bool:
    """Returns whether a layer has no `custom_vjp`, so that JAX differentiates it.

    These are layers over an axis of `jax.vmap`, whose operands are not FP8, and layers
    in plain `jax.lax` outside of `shard_map`, for whose gradients JAX chooses the
    shardings on an explicit mesh. FP8 and `main_grad` need the `custom_vjp`.
    """
    if config.is_mapped:
        check_no_main_grad(config, main_grads)
        return True
    is_plain = config.takes_f64 and main_grads is None and not is_scaled(operands[0])
    return is_plain and vma.is_sharded(operands)


def column_forward(
    config: CallConfig,
    x: Operand,
    ws: tuple[Operand, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    *_: Any,
) -> tuple[tuple[jax.Array, ...], Operand | None]:
    """Computes `all_gather(x) @ w_i + bias_i + residual` for each kernel w_i.

    Without overlap, `ws` has only one kernel. If `jax.vmap` maps any operand, it maps
    all results, unless JAX itself differentiates the layer.

    Returns:
        The products `[..., M, N_i]`, and the gathered x if `config.returns_gathered`.
    """
    options = {**_options(config), "out_dtype": config.out_dtype}
    if config.overlap:
        ys, gathered = matmuls.all_gather_matmul(
            config.overlapped,
            wire.as_sent(config.overlapped, x),
            ws,
            biases,
            None if residual is None else (residual,),
            return_gathered=config.returns_gathered,
            **options,
        )
        gathered = wire.widened(x, gathered)
    else:
        sent = wire.as_sent(config.collective, x)
        rows = wire.widened(x, all_gather(config.collective, sent))
        (bias,) = biases or (None,)
        ys = (matmuls.matmul(config.local, (rows,), ws, bias, residual, **options),)
        gathered = rows if config.returns_gathered else None
    if config.is_mapped or (len(ys) == 1 and gathered is None):
        return ys, gathered
    return mapped_together((ys, gathered), (x, ws, biases, residual))


def row_forward(
    config: CallConfig,
    x: Operand | tuple[Operand, ...],
    ws: tuple[Operand, ...],
    biases: tuple[jax.Array, ...] | None = None,
    residual: jax.Array | None = None,
    *_: Any,
) -> tuple[tuple[jax.Array, ...], None]:
    """Computes `x @ w`, summed over the ranks if the layer is row-parallel.

    Bias and residual are added once, after the reduction. If x is a tuple with one
    array for each kernel, the products are added, too.
    """
    xs = x if isinstance(x, tuple) else (x,)
    (bias,) = biases or (None,)
    op, dtype = config.mode.op, config.out_dtype
    options = _options(config)
    operands = (xs, ws, bias, residual)
    if wire.sends_partial_sums(config, xs[0]):
        y = wire.matmul_reduce_scatter(config, *operands, out_dtype=dtype, **options)
        return (y,), None
    if op == "matmul" or config.overlap:
        product = {
            "matmul": matmuls.matmul,
            "matmul_reduce_scatter": matmuls.matmul_reduce_scatter,
            "matmul_all_reduce": matmuls.matmul_all_reduce,
        }[op]
        execution = config.local if op == "matmul" else config.overlapped
        return (product(execution, *operands, out_dtype=dtype, **options),), None
    partial = matmuls.matmul(config.local, xs, ws, out_dtype=jnp.float32, **options)
    if op == "matmul_all_reduce":
        y = all_reduce(config.collective, partial, bias, residual)
        return (y.astype(dtype),), None
    is_sum = bias is None and residual is None
    sum_dtype = dtype if is_sum else jnp.float32
    y = reduce_scatter(config.collective, partial, out_dtype=sum_dtype)
    return (reference.add(y, bias, residual, out_dtype=dtype),), None


def _options(config) -> dict[str, Any]:
    return {"rhs_transposed": config.rhs_transposed, "scale": config.scale}


def dgrad_config(
    config: CallConfig,
    parallel: str | None,
    *,
    sequence_parallel: bool = True,
    **fields,
) -> CallConfig:
    """Returns the settings of a dgrad, run as a forward pass on transposed kernels.

    Args:
        config: the settings of the pass.
        parallel: with `sequence_parallel`, the mode whose forward pass is the product.
        sequence_parallel: see `parallel`.
        **fields: other fields to replace.
    """
    return dataclasses.replace(
        config,
        mode=mode_of(parallel, sequence_parallel),
        rhs_transposed=not config.rhs_transposed,
        **fields,
    )


def is_replicated(config: CallConfig, x: Any) -> bool:
    """Returns whether x is equal on all ranks, by the varying axes of its type.

    It is False if the forward pass communicates.
    """
    if config.mode.op != "matmul" or not config.is_vma_checked:
        return False
    return not frozenset(config.axis_name) & vma.axes_of(*jax.tree.leaves(x))
