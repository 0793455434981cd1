"""`wgrad_accumulate`: adds the gradient of a kernel to its accumulator in place."""

import functools

import jax

from jax_ub._src import checks as shapes
from jax_ub._src import reference
from jax_ub._src.primitives.wgrad import wgrad
from jax_ub._src.rules.call_config import make_local_call_config
from jax_ub._src.rules.vjp import promote

OP = "wgrad_accumulate"


def wgrad_accumulate(x: jax.Array, dy: jax.Array, main_grad: jax.Array) -> jax.Array:
    """Adds `x.T @ dy`, summed over all rows, to `main_grad`.

    The sum is written in place if the buffer of `main_grad` is free.

    Transformer Engine: `fuse_wgrad_accumulation`. It does not communicate. With a mesh,
    call it inside `jax.shard_map`.

    Args:
        x: activations, `[..., K]`.
        dy: gradient of the layer's result, `[..., N]`.
        main_grad: accumulator, `[K, N]`, usually f32. A bf16 or f16 accumulator is
            rounded at every call.

    Returns:
        `[K, N]`, summed in f32 and rounded once to the dtype of `main_grad`.

    Raises:
        ShapeContractError: if the operands do not match each other.
        UnsupportedOverlapError: if the program runs on several devices and the call is
            not inside a `jax.shard_map` over all mesh axes.
    """
    call_config = make_local_call_config(OP)
    shapes.check_rank(OP, "x", x, 1)
    for name, array in (("dy", dy), ("main_grad", main_grad)):
        shapes.check_array(OP, name, array)
    shapes.check_float(OP, x=x, dy=dy, main_grad=main_grad)
    shapes.check_dtypes(OP, x=x, dy=dy)
    for name, array in (("x", x), ("dy", dy)):
        shapes.check_not_empty(OP, name, array)
    rows = (*x.shape[:-1], dy.shape[-1] if dy.ndim else 0)
    shapes.check_shape(OP, "dy", dy, rows, "[..., N] with x's rows")
    wanted = (x.shape[-1], dy.shape[-1])
    shapes.check_shape(OP, "main_grad", main_grad, wanted, "[K, N]")
    x, dy, main_grad = promote((x, dy, main_grad), call_config.axes(x, dy, main_grad))
    if x.ndim == 1:
        x, dy = x[None], dy[None]
    return _wgrad_accumulate(call_config, x, dy, main_grad)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wgrad_accumulate(call_config, x, dy, main_grad):
    return wgrad(
        x, (dy,), (main_grad,), out_dtype=main_grad.dtype, **call_config.local
    )[0]


def _wgrad_accumulate_fwd(call_config, x, dy, main_grad):
    return _wgrad_accumulate(call_config, x, dy, main_grad), (x, dy, main_grad)


def _wgrad_accumulate_bwd(call_config, operands, gradient):
    return jax.vjp(_plain, *operands)[1](gradient)


_wgrad_accumulate.defvjp(_wgrad_accumulate_fwd, _wgrad_accumulate_bwd)


def _plain(x, dy, main_grad):
    return reference.add(reference.outer(x, dy), main_grad, out_dtype=main_grad.dtype)
