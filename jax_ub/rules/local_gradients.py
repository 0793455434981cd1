"""The gradients of a product whose operands a rank has whole: two GEMMs of its own."""

from collections.abc import Callable
from typing import Any

import jax

from jax_ub.primitives.matmul import matmul
from jax_ub.primitives.wgrad import wgrad
from jax_ub.rules.call_config import CallConfig
from jax_ub.rules.layer import accumulation


def local_gradients(
    call_config: CallConfig,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of `x` and of the kernel, as far as they are wanted.

    Args:
        call_config: the call.
        x: activations, `[..., M, K]`; None if the kernel's gradient is not wanted.
        w: kernel, `[K, N]`; None if the gradient of x is not wanted.
        dy: gradient of the result, `[..., M, N]`.
        main_grad: what the kernel's gradient is added to, f32 `[K, N]`, or None.

    Returns:
        `[..., M, K]` and `[K, N]`, or None.
    """
    dx = dgrad(call_config, matmul, call_config.local, w, dy)
    return dx, local_wgrad(call_config, x, dy, main_grad)


def dgrad(
    call_config: CallConfig,
    product: Callable[..., jax.Array],
    where: dict[str, Any],
    w: jax.Array | None,
    dy: jax.Array,
) -> jax.Array | None:
    """`dy @ w.T` by a product, which may sum over the ranks; None without `w`."""
    if w is None:
        return None
    return product(
        (dy.astype(call_config.dtype),),
        (w,),
        None,
        None,
        rhs_transposed=not call_config.rhs_transposed,
        out_dtype=call_config.dtype,
        **where,
    )


def local_wgrad(
    call_config: CallConfig,
    x: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
) -> jax.Array | None:
    """`x.T @ dy`, or its transpose where kernels lie so; None without `x`."""
    if x is None:
        return None
    main_grads, dtype = accumulation(call_config, (dy,), main_grad)
    dy = dy.astype(call_config.dtype)
    if call_config.rhs_transposed:
        x, dy = dy, x
    return wgrad(x, (dy,), main_grads, out_dtype=dtype, **call_config.local)[0]
