"""The backward pass of a GEMM that does not communicate: two local GEMMs."""

from collections.abc import Callable
from typing import Any

import jax

from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.layer import accumulation


def local_gradients(
    call_config: CallConfig,
    x: jax.Array | None,
    w: jax.Array | None,
    dy: jax.Array,
    main_grad: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes both gradients of `x @ w` by GEMMs that do not communicate.

    Args:
        call_config: the configuration of the call.
        x: activations, `[..., M, K]`; None if the kernel's gradient is not needed.
        w: kernel, `[K, N]`; None if the gradient of x is not needed.
        dy: gradient of the result, `[..., M, N]`.
        main_grad: accumulator of the kernel's gradient, f32 `[K, N]`, or None.

    Returns:
        The gradients `[..., M, K]` and `[K, N]`, each None if it is not needed.
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
    """Computes the gradient of x, `dy @ w.T`; returns None if `w` is None.

    Args:
        call_config: the configuration of the call.
        product: the primitive that multiplies: `matmul`, or `matmul_all_reduce`, which
            also sums over the ranks.
        where: the `Call` fields of that primitive.
        w: kernel, or None.
        dy: gradient of the result.
    """
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
    """Computes the kernel's gradient by a GEMM on this rank's rows, or None.

    The gradient is `x.T @ dy`, or `dy.T @ x` for kernels [out, in]. It is None if
    `x` is None. A `main_grad` is added to it.
    """
    if x is None:
        return None
    main_grads, dtype = accumulation(call_config, (dy,), main_grad)
    dy = dy.astype(call_config.dtype)
    if call_config.rhs_transposed:
        x, dy = dy, x
    return wgrad(x, (dy,), main_grads, out_dtype=dtype, **call_config.local)[0]
