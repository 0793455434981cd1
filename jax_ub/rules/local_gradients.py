"""The gradients of a product whose operands a rank has whole: two GEMMs of its own."""

from collections.abc import Callable
from typing import Any

import jax

from jax_ub.primitives.matmul import matmul
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.layer import accumulation
from jax_ub.rules.site import Site


def local_gradients(
    site: Site,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of `x` and of the kernel, as far as they are wanted.

    Args:
        site: the call.
        x: activations, `[..., M, K]`; None if the kernel's gradient is not wanted.
        w: kernel, `[K, N]`; None if the gradient of x is not wanted.
        dy: gradient of the result, `[..., M, N]`.
        main_grad: what the kernel's gradient is added to, f32 `[K, N]`, or None.

    Returns:
        `[..., M, K]` and `[K, N]`, or None.
    """
    dx = dgrad(site, matmul, site.local, w, dy)
    return dx, local_wgrad(site, x, dy, main_grad)


def dgrad(
    site: Site,
    product: Callable[..., jax.Array],
    where: dict[str, Any],
    w: jax.Array | None,
    dy: jax.Array,
) -> jax.Array | None:
    """`dy @ w.T` by a product, which may sum over the ranks; None without `w`."""
    if w is None:
        return None
    return product(
        (dy.astype(site.dtype),),
        (w,),
        None,
        None,
        rhs_transposed=not site.rhs_transposed,
        out_dtype=site.dtype,
        **where,
    )


def local_wgrad(
    site: Site, x: jax.Array | None, dy: jax.Array, main_grad: jax.Array | None
) -> jax.Array | None:
    """`x.T @ dy`, or its transpose where kernels lie so; None without `x`."""
    if x is None:
        return None
    main_grads, dtype = accumulation(site, (dy,), main_grad)
    dy = dy.astype(site.dtype)
    if site.rhs_transposed:
        x, dy = dy, x
    return wgrad(x, (dy,), main_grads, out_dtype=dtype, **site.local)[0]
