"""`dgrad_add`: adds the gradient of a layer's input to another gradient in place."""

import functools

import jax

from jax_ub._src import checks as shapes
from jax_ub._src import reference
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.primitives.matmul import matmul
from jax_ub._src.rules.call_config import make_local_call_config
from jax_ub._src.rules.vjp import promote

OP = "dgrad_add"


def dgrad_add(dy: jax.Array, w: jax.Array, residual: jax.Array) -> jax.Array:
    """Adds `dy @ w.T` to `residual`, in place if the buffer of `residual` is free.

    Transformer Engine: `BackwardLinearAdd`. It does not communicate. With a mesh, call
    it inside `jax.shard_map`.

    Args:
        dy: gradient of a layer's result, `[..., N]`.
        w: the layer's kernel, `[K, N]`.
        residual: gradient of the same input from the residual branch, `[..., K]`.

    Returns:
        `[..., K]`, summed in f32 and rounded once to the dtype of `residual`.

    Raises:
        ShapeContractError: if the operands do not match each other.
        UnsupportedOverlapError: if the program runs on several devices and the call is
            not inside a `jax.shard_map` over all mesh axes.
    """
    call_config = make_local_call_config(OP)
    shapes.check_rank(OP, "dy", dy, 1)
    shapes.check_operands(OP, dy, call_config.kernel(w), x_name="dy")
    if dy.shape[-1] != w.shape[1]:
        raise ShapeContractError(
            f"{OP}: dy {dy.shape} has N = {dy.shape[-1]}, but w {w.shape} has N = "
            f"{w.shape[1]}. Kernels are [K, N], as in the forward; pass w untransposed."
        )
    shapes.check_array(OP, "residual", residual)
    shapes.check_float(OP, residual=residual)
    wanted = (*dy.shape[:-1], w.shape[0])
    shapes.check_shape(OP, "residual", residual, wanted, "[..., K] with dy's rows")
    dy, w, residual = promote((dy, w, residual), call_config.axes(dy, w, residual))
    if dy.ndim == 1:
        return _dgrad_add(call_config, dy[None], w, residual[None])[0]
    return _dgrad_add(call_config, dy, w, residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dgrad_add(call_config, dy, w, residual):
    return matmul(
        (dy,),
        (w,),
        None,
        residual,
        rhs_transposed=True,
        out_dtype=residual.dtype,
        **call_config.local,
    )


def _dgrad_add_fwd(call_config, dy, w, residual):
    return _dgrad_add(call_config, dy, w, residual), (dy, w, residual)


def _dgrad_add_bwd(call_config, operands, gradient):
    return jax.vjp(_plain, *operands)[1](gradient)


_dgrad_add.defvjp(_dgrad_add_fwd, _dgrad_add_bwd)


def _plain(dy, w, residual):
    y = reference.dot(dy, w, rhs_transposed=True)
    return reference.add(y, residual, out_dtype=residual.dtype)
