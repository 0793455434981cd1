"""The backward pass of `matmul_reduce_scatter`; dgrad and wgrad gather dy once."""

import jax

from jax_ub._src.primitives.all_gather import all_gather
from jax_ub._src.primitives.all_gather_matmul import all_gather_matmul
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.layer import accumulation


def row_gradients(
    call_config: CallConfig,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the backward pass of `matmul_reduce_scatter`: gradients of x and w.

    Args:
        call_config: the configuration of the call.
        x: activations, `[..., M, K/P]`; None if the kernel's gradient is not needed.
        w: kernel, `[K/P, N]`, or `[N, K/P]` if `call_config.rhs_transposed`; None if
            the gradient of x is not needed.
        dy: gradient of the result, `[..., M/P, N]`: this rank's rows.
        main_grad: accumulator of the kernel's gradient, f32, of the kernel's shape; or
            None.
        residual: addend of the gradient of x, `[..., M, K/P]`, or None. The sum has
            the residual's dtype and overwrites its buffer.

    Returns:
        The gradient of x, `[..., M, K/P]`, and the gradient of the kernel, of the
        kernel's shape; each None if it is not needed.
    """
    dy = dy.astype(call_config.dtype)
    # The wgrad reuses the dy that the dgrad gathers, unless the method reads dy from
    # the peers' memory without gathering it.
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
    # For a kernel [out, in] the gradient is dy^T x, so dy is wgrad's first operand.
    first, second = (rows, x) if call_config.rhs_transposed else (x, rows)
    name = "x" if call_config.rhs_transposed else "dy"
    gather = name if gathered is None else None
    (dw,) = wgrad(first, (second,), main_grads, gather=gather, out_dtype=dtype, **where)
    return dx, dw
