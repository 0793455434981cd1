"""The gradients of GEMM+RS: one gather of dy serves dgrad and wgrad."""

import jax

from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.all_gather_matmul import all_gather_matmul
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.layer import accumulation
from jax_ub.rules.site import Site


def row_gradients(
    site: Site,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of `x` and of the kernel, as far as they are wanted.

    Args:
        site: the call.
        x: activations, `[..., M, K/P]`; None if the kernel's gradient is not wanted.
        w: kernel, `[K/P, N]`, or `[N, K/P]` if `site.rhs_transposed`; None if the
            gradient of x is not wanted.
        dy: gradient of the result, `[..., M/P, N]`: this rank's rows.
        main_grad: what the kernel's gradient is added to, f32, of the kernel's shape;
            or None.
        residual: what the gradient of x is added to, `[..., M, K/P]`, in its buffer
            and its dtype; or None.

    Returns:
        `[..., M, K/P]` and the kernel's shape, or None.
    """
    dy = dy.astype(site.dtype)
    # What the dgrad gathers serves the wgrad too, unless that reads it in place.
    reuses = x is not None and site.dgrad.copies_operands
    dx = gathered = None
    if w is not None:
        (dx,), gathered = all_gather_matmul(
            dy,
            (w,),
            None,
            None if residual is None else (residual,),
            rhs_transposed=not site.rhs_transposed,
            return_gathered=reuses,
            out_dtype=site.dtype if residual is None else residual.dtype,
            **site.dgrad.fused,
        )
    if x is None:
        return dx, None
    site = site.wgrad
    if gathered is None and site.method.copies_operands:
        gathered = all_gather(dy, **site.alone)
    main_grads, dtype = accumulation(site, (dy,), main_grad)
    rows, where = (dy, site.fused) if gathered is None else (gathered, site.local)
    # dy^T x where the kernel is [out, in]: its first operand has the rows.
    first, second = (rows, x) if site.rhs_transposed else (x, rows)
    name = "x" if site.rhs_transposed else "dy"
    gather = name if gathered is None else None
    (dw,) = wgrad(first, (second,), main_grads, gather=gather, out_dtype=dtype, **where)
    return dx, dw
