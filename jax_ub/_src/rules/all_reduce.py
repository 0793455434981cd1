"""`all_reduce`, the sum over the ranks, with its derivative."""

import functools

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.primitives import varying
from jax_ub._src.primitives.all_reduce import all_reduce as reduced
from jax_ub._src.rules.call_config import make_call_config
from jax_ub._src.rules.vjp import promote

OP = "all_reduce"


def all_reduce(x: jax.Array, *, axis_name: str | tuple[str, ...]) -> jax.Array:
    """Sums `x` over the ranks; the backward pass is the identity.

    Under `jax.shard_map(check_vma=True)` neither the result nor its gradient varies
    over `axis_name`, and the gradient of each rank's `x` equals the gradient of the
    result. With `check_vma=False` JAX's convention for `jax.lax.psum` holds: the
    gradient of a replicated value is the sum of the ranks' gradients, so the backward
    pass all-reduces them.

    Transformer Engine: `te.ops.AllReduce`.

    Args:
        x: array of any shape.
        axis_name: the mesh axis, of size P, to sum over.

    Returns:
        The sum, computed in f32 and rounded once to the dtype of `x`; the same on every
        rank.

    Raises:
        ShapeContractError: if `x` is empty, is not f32, bf16 or f16, or exceeds the
            capacity of `initialize_ub`, or if the axis is not a manual mesh axis.
        UnsupportedOverlapError: if some mesh axes are not manual in the surrounding
            `jax.shard_map`.
    """
    call_config = make_call_config(OP, axis_name, None, None)
    shapes.check_array(call_config.label, "x", x)
    shapes.check_float(call_config.label, x=x)
    shapes.check_not_empty(call_config.label, "x", x)
    return _all_reduce(call_config, promote(x, call_config.axes(x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_reduce(call_config, x):
    return reduced(x, **call_config.alone)


def _all_reduce_fwd(call_config, x):
    return _all_reduce(call_config, x), None


def _all_reduce_bwd(call_config, residuals, dy):
    if call_config.is_vma_checked:
        return (varying.promote(dy, call_config.axis_name),)
    return (reduced(dy, **call_config.alone),)


_all_reduce.defvjp(_all_reduce_fwd, _all_reduce_bwd)
