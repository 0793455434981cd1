"""The backward pass of `all_gather_matmul`, for each method of overlap."""

import math

import jax

from jax_ub._src.config.tuned_file import COLUMN_GRADIENTS
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.methods import Method
from jax_ub._src.primitives.all_gather import all_gather
from jax_ub._src.primitives.bulk_all_gather import bulk_all_gather
from jax_ub._src.primitives.bulk_reduce_scatter import bulk_reduce_scatter
from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.primitives.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub._src.primitives.reduce_scatter import reduce_scatter
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.reference import sum_dtype
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.layer import accumulation
from jax_ub._src.rules.vjp import is_zero


def column_gradients(
    call_config: CallConfig, residuals: dict, dys: dict[int, jax.Array], d_gathered
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """Computes the backward pass of `all_gather_matmul`: gradients of x and kernels.

    Args:
        call_config: the configuration of the call.
        residuals: with these keys, each None if it is not needed. "x": this rank's rows
            of x, or "gathered": all rows of x, to compute kernel gradients. "ws": the
            kernels, to compute the gradient of x. "main_grads": the accumulators.
        dys: gradients `[..., M, N_i]` by the index i of the result; results whose
            gradient is zero are left out.
        d_gathered: gradient of the gathered x, `[..., M, K]`, or a symbolic zero.

    Returns:
        The gradient of x, `[..., M/P, K]` or None, and the gradients of the kernels,
        `[K, N_i]` by index i.
    """
    call_config = call_config.dgrad
    ws, main_grads = residuals["ws"], residuals["main_grads"]
    if ws is not None:
        ws = tuple(ws[i] for i in dys)
    if main_grads is not None:
        main_grads = tuple(main_grads[i] for i in dys)
    gradients = tuple(dy.astype(call_config.dtype) for dy in dys.values())
    x, gathered = residuals["x"], residuals["gathered"]
    if not dys:
        return _scattered(call_config, ws, d_gathered, call_config.dtype), {}
    _check_bulk(call_config)
    # The bulk all-gather primitive takes kernels in [in, out] layout only.
    may_be_bulk = ws is not None and not call_config.rhs_transposed
    if may_be_bulk and x is not None:
        call_config = _as_tuned(call_config, x, gradients)
        is_bulk = call_config.uses_bulk
    else:
        # If the forward pass has saved the gathered x, "auto" does not become "bulk".
        is_bulk = (
            may_be_bulk and gathered is not None and call_config.method is Method.BULK
        )
    if is_bulk:
        dx, dws = _bulk(call_config, x, gathered, gradients, ws, main_grads, d_gathered)
    else:
        dx = _dgrad(call_config, gradients, ws, d_gathered)
        dws = _wgrad(call_config, x, gathered, gradients, main_grads)
    return dx, dict(zip(dys, dws, strict=False))


def _check_bulk(call_config):
    """Raises an error if method "bulk" was requested for kernels stored as [out, in].

    If "bulk" is only the default of a name, the gradients run without it.
    """
    is_explicit = call_config.method is Method.BULK and call_config.choice.is_explicit
    if is_explicit and call_config.rhs_transposed:
        raise UnsupportedOverlapError(
            f'{call_config.label}: method "bulk" of the dgrad needs a kernel [in, '
            f"out], but "
            "rhs_transposed = True. Pass the kernel [in, out], or configure another "
            'method, for example "ring_exchange".'
        )


def _as_tuned(call_config, x, dys):
    """Replaces "auto" by the method measured fastest for dgrad and wgrad together."""
    M = math.prod(dys[0].shape[:-1])
    N = call_config.num_ranks * sum(dy.shape[-1] for dy in dys)
    return call_config.with_tuned_method(COLUMN_GRADIENTS, M, x.shape[-1], N)


def _scattered(call_config, ws, d_gathered, dtype):
    if ws is None or is_zero(d_gathered):
        return None
    return reduce_scatter(d_gathered, out_dtype=dtype, **call_config.alone)


def _dgrad(call_config, dys, ws, d_gathered):
    if ws is None:
        return None
    return matmul_reduce_scatter(
        dys,
        ws,
        None,
        _scattered(call_config, ws, d_gathered, sum_dtype(call_config.dtype)),
        rhs_transposed=not call_config.rhs_transposed,
        out_dtype=call_config.dtype,
        **call_config.fused,
    )


def _wgrad(call_config, x, gathered, dys, main_grads):
    if gathered is None and x is None:
        return ()
    main_grads, dtype = accumulation(call_config, dys, *(main_grads or (None,)))
    is_one = len(dys) == 1 or not call_config.rhs_transposed
    if gathered is None and (call_config.method.materializes_gather or not is_one):
        gathered = all_gather(x, **call_config.alone)
    rows, where = (
        (x, call_config.fused) if gathered is None else (gathered, call_config.local)
    )
    gather = "x" if gathered is None else None
    if not call_config.rhs_transposed:
        return wgrad(rows, dys, main_grads, gather=gather, out_dtype=dtype, **where)
    # dw_i = dy_i^T x, one wgrad per kernel, with x in the place of dy.
    return tuple(
        wgrad(
            dy,
            (rows,),
            main_grads and (main_grads[i],),
            gather=gather and "dy",
            out_dtype=dtype,
            **where,
        )[0]
        for i, dy in enumerate(dys)
    )


def _bulk(call_config, x, gathered, dys, ws, main_grads, d_gathered):
    # The all-gather of x overlaps the dgrad, dy w^T. The reduce-scatter of the dgrad's
    # partial sums overlaps the wgrad, x^T dy.
    dtype = call_config.partial_dtype(len(dys))
    if gathered is None:
        partial, gathered = bulk_all_gather(
            dys, ws, x, partial_dtype=dtype, **call_config.bulk
        )
    else:
        partial = matmul(
            dys,
            ws,
            None,
            None,
            rhs_transposed=True,
            out_dtype=dtype,
            **call_config.local,
        )
    if not is_zero(d_gathered):
        partial += d_gathered.astype(dtype)
    main_grads, dtype = accumulation(call_config, dys, *(main_grads or (None,)))
    dws, dx = bulk_reduce_scatter(
        gathered,
        dys,
        main_grads,
        partial,
        dw_dtype=dtype,
        scattered_dtype=call_config.dtype,
        **call_config.bulk,
    )
    return dx, dws
