"""The gradients of AG+GEMM: how each method combines dgrad, wgrad and communication."""

import jax
import jax.numpy as jnp

from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.bulk_all_gather import bulk_all_gather
from jax_ub.primitives.bulk_reduce_scatter import bulk_reduce_scatter
from jax_ub.primitives.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub.primitives.reduce_scatter import reduce_scatter
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.layer import accumulation
from jax_ub.rules.site import Site, is_zero


def column_gradients(
    site: Site, residuals: dict, dys: dict[int, jax.Array], d_gathered
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """Computes the gradients of `x` and of the kernels, as far as they are wanted.

    Args:
        site: the call.
        residuals: `x`, its rows, or `gathered`, all rows, where a kernel's gradient is
            wanted; `ws` where that of x is; `main_grads` where they are accumulated.
        dys: gradients of the results that have one, `[..., M, N_i]`, by their index.
        d_gathered: gradient of the gathered x, `[..., M, K]`, or a zero.

    Returns:
        `[..., M/P, K]` or None, and `[K, N_i]` by the index of the kernel.
    """
    site = site.dgrad
    ws, main_grads = residuals["ws"], residuals["main_grads"]
    if ws is not None:
        ws = tuple(ws[i] for i in dys)
    if main_grads is not None:
        main_grads = tuple(main_grads[i] for i in dys)
    gradients = tuple(dy.astype(site.dtype) for dy in dys.values())
    x, gathered = residuals["x"], residuals["gathered"]
    if not dys:
        return _scattered(site, ws, d_gathered, site.dtype), {}
    if site.communicates_beside and x is not None and ws is not None:
        dx, dws = _bulk(site, x, gradients, ws, main_grads)
    else:
        dx = _dgrad(site, gradients, ws, d_gathered)
        dws = _wgrad(site, x, gathered, gradients, main_grads)
    return dx, dict(zip(dys, dws, strict=False))


def _scattered(site, ws, d_gathered, dtype):
    if ws is None or is_zero(d_gathered):
        return None
    return reduce_scatter(d_gathered, out_dtype=dtype, **site.alone)


def _dgrad(site, dys, ws, d_gathered):
    if ws is None:
        return None
    return matmul_reduce_scatter(
        dys,
        ws,
        None,
        _scattered(site, ws, d_gathered, jnp.float32),
        rhs_transposed=True,
        out_dtype=site.dtype,
        **site.fused,
    )


def _wgrad(site, x, gathered, dys, main_grads):
    if gathered is None and x is None:
        return ()
    main_grads, dtype = accumulation(site, *(main_grads or (None,)))
    if gathered is None and not site.method.copies_operands:
        return wgrad(x, dys, main_grads, gather="x", out_dtype=dtype, **site.fused)
    if gathered is None:
        gathered = all_gather(x, **site.alone)
    return wgrad(gathered, dys, main_grads, out_dtype=dtype, **site.local)


def _bulk(site, x, dys, ws, main_grads):
    # x is gathered beside dy w^T, whose sums are scattered beside x^T dy.
    dtype = site.partial_dtype(len(dys))
    partial, gathered = bulk_all_gather(dys, ws, x, partial_dtype=dtype, **site.bulk)
    main_grads, dtype = accumulation(site, *(main_grads or (None,)))
    dws, dx = bulk_reduce_scatter(
        gathered,
        dys,
        main_grads,
        partial,
        dw_dtype=dtype,
        scattered_dtype=site.dtype,
        **site.bulk,
    )
    return dx, dws
