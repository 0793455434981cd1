"""The gradients of GEMM+RS: one gather of dy serves dgrad and wgrad."""

import jax

from jax_ub.primitives.all_gather import all_gather
from jax_ub.primitives.all_gather_matmul import all_gather_matmul
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.call_config import CallConfig
from jax_ub.rules.layer import accumulation


def row_gradients(
    call_config: CallConfig,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of `x` and of the kernel, as far as they are wanted.

    Args:
        call_config: the call.
        x: activations, `[..., M, K/P]`; None if the kernel's gradient is not wanted.
        w: kernel, `[K/P, N]`, or `[N, K/P]` if `call_config.rhs_transposed`; None if
            the gradient of x is not wanted.
        dy: gradient of the result, `[..., M/P, N]`: this rank's rows.
        main_grad: what the kernel's gradient is added to, f32, of the kernel's shape;
            or None.
        residual: what the gradient of x is added to, `[..., M, K/P]`, in its buffer
            and its dtype; or None.

    Returns:
        `[..., M, K/P]` and the kernel's shape, or None.
    """
    dy = dy.astype(call_config.dtype)
    # What the dgrad gathers serves the wgrad too, unless that reads it in place.
    reuses = x is not None and call_config.dgrad.materializes_gather
    dx = gathered = None
    if w is not None:
        (dx,), gathered = all_gather_matmul(
            dy,
            (w,),
            None,
            None if residual is None else (residual,),
            rhs_transposed=not call_config.rhs_transposed,
            return_gathered=reuses,
            out_dtype=call_config.dtype if residual is None else residual.dtype,
            **call_config.dgrad.fused,
        )
    if x is None:
        return dx, None
    call_config = call_config.wgrad
    if gathered is None and call_config.method.materializes_gather:
        gathered = all_gather(dy, **call_config.alone)
    main_grads, dtype = accumulation(call_config, (dy,), main_grad)
    rows, where = (
        (dy, call_config.fused) if gathered is None else (gathered, call_config.local)
    )
    # dy^T x where the kernel is [out, in]: its first operand has the rows.
    first, second = (rows, x) if call_config.rhs_transposed else (x, rows)
    name = "x" if call_config.rhs_transposed else "dy"
    gather = name if gathered is None else None
    (dw,) = wgrad(first, (second,), main_grads, gather=gather, out_dtype=dtype, **where)
    return dx, dw
