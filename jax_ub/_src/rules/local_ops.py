"""Differentiable ops without a layer: `dgrad_add`, `wgrad_accumulate`, `all_reduce`."""

import functools

import jax

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.primitives import collectives, vma
from jax_ub._src.primitives.matmuls import matmul, wgrad
from jax_ub._src.rules.call_config import make_call_config, plan_call_config
from jax_ub._src.rules.operands import (
    as_row,
    check_formats,
    check_layout,
    check_replicated,
    have_scales,
)
from jax_ub._src.rules.vjp import (
    check_sources,
    emptied,
    from_saved,
    not_reduced,
    row_sum,
    to_saved,
)
from jax_ub._src.scaled_array import (
    ScaledArray,
    cotangent_of_scaled,
    is_scaled,
    map_scaled,
    values_of,
    with_scalar_scale,
)


def dgrad_add(
    dy: jax.Array | ScaledArray, w: jax.Array | ScaledArray, residual: jax.Array
) -> jax.Array:
    """Adds `dy @ w.T` to `residual`, in place if the buffer of `residual` is free.

    Transformer Engine: `BackwardLinearAdd`. It does not communicate. With a mesh, call
    it inside `jax.shard_map`.

    `dy` and `w` may both be FP8, as `ub.ScaledArray`s of any recipe: `dy` with the role
    "output_grad", `w` with the role "kernel". Their `source` receives the gradient.

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
    op = "dgrad_add"
    config = plan_call_config(op, (), 1)
    is_fp8 = have_scales(op, dy=dy, w=w)
    shapes.check_rank(op, "dy", values_of(dy), 1)
    if is_fp8:
        shapes.check_kernel(op, "w", w)
        shapes.check_not_empty(op, "dy", dy)
        check_formats(op, dy=dy, w=w)
        check_layout(op, "dy", dy, dy.ndim - 1)
        check_layout(op, "w", w, 0)
        dy, w = map_scaled(with_scalar_scale, (dy, w))
    else:
        shapes.check_operands(op, dy, config.kernel(w), x_name="dy")
    if dy.shape[-1] != w.shape[1]:
        raise ShapeContractError(
            f"{op}: dy {dy.shape} has N = {dy.shape[-1]}, but w {w.shape} has N = "
            f"{w.shape[1]}. Kernels are [K, N], as in the forward; pass w untransposed."
        )
    shapes.check_array(op, "residual", residual)
    shapes.check_float(op, residual=residual)
    wanted = (*dy.shape[:-1], w.shape[0])
    shapes.check_shape(op, "residual", residual, wanted, "[..., K] with dy's rows")
    if dy.ndim == 1:
        return _dgrad_add(config, as_row(dy), w, residual[None])[0]
    return _dgrad_add(config, dy, w, residual)


def _compute_dgrad_add(config, dy, w, residual):
    return matmul(
        config.local,
        (dy,),
        (w,),
        residual=residual,
        rhs_transposed=True,
        out_dtype=residual.dtype,
    )


def _differentiable(compute, *names):
    """Makes an op differentiable. Its gradients are those of the same op in plain JAX.

    FP8 operands are dequantized to compute the gradients, which their `source`
    receives. `names` are the names of all operands. The result has the sharding of the
    last operand.
    """
    rule = jax.custom_vjp(compute, nondiff_argnums=(0,))

    def forward(config, *operands):
        check_sources(config.label, **dict(zip(names, operands, strict=True)))
        values = jax.tree.map(lambda operand: operand.value, operands)
        return rule(config, *not_reduced(values)), to_saved(values)

    def backward(config, operands, gradient):
        operands = from_saved(operands)
        wide = map_scaled(lambda x: x.dequantize(), operands)
        plain = functools.partial(compute, config.plain)
        gradients = jax.vjp(plain, *wide)[1](gradient)
        return tuple(
            _cotangent(operand, found)
            for operand, found in zip(operands, gradients, strict=True)
        )

    rule.defvjp(forward, backward, symbolic_zeros=True)
    jitted = jax.jit(rule, static_argnums=0, inline=True)

    def call(config, *operands):
        sharding = jax.typeof(operands[-1]).sharding
        axes = config.axes(*operands)
        operands = vma.pcast_varying(vma.unsharded(operands), axes)
        with jax.disable_jit(False):  # see `vjp.differentiable`
            return vma.with_sharding(jitted(config, *operands), sharding)

    return call


def _cotangent(operand, gradient):
    if not is_scaled(operand):
        return gradient
    return None if operand.source is None else cotangent_of_scaled(gradient)


_dgrad_add = _differentiable(_compute_dgrad_add, "dy", "w", "residual")


def wgrad_accumulate(
    x: jax.Array | ScaledArray, dy: jax.Array | ScaledArray, main_grad: jax.Array
) -> jax.Array:
    """Adds `x.T @ dy`, summed over all rows, to `main_grad`.

    The sum is written in place if the buffer of `main_grad` is free.

    Transformer Engine: `fuse_wgrad_accumulation`. It does not communicate. With a mesh,
    call it inside `jax.shard_map`.

    `x` and `dy` may both be FP8, as `ub.ScaledArray`s of any recipe: `x` with the role
    "input", `dy` with the role "output_grad". Their `source` receives the gradient.

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
    op = "wgrad_accumulate"
    config = plan_call_config(op, (), 1)
    is_fp8 = have_scales(op, x=x, dy=dy)
    shapes.check_rank(op, "x", values_of(x), 1)
    for name, array in (("dy", values_of(dy)), ("main_grad", main_grad)):
        shapes.check_array(op, name, array)
    shapes.check_float(op, main_grad=main_grad)
    if is_fp8:
        check_formats(op, x=x, dy=dy)
        x, dy = map_scaled(with_scalar_scale, (x, dy))
    else:
        shapes.check_float(op, x=x, dy=dy)
        shapes.check_dtypes(op, x=x, dy=dy)
    for name, array in (("x", x), ("dy", dy)):
        shapes.check_not_empty(op, name, array)
    rows = (*x.shape[:-1], dy.shape[-1] if dy.ndim else 0)
    shapes.check_shape(op, "dy", values_of(dy), rows, "[..., N] with x's rows")
    if is_fp8:
        check_layout(op, "x", x, x.ndim - 1)
        check_layout(op, "dy", dy, dy.ndim - 1)
    wanted = (x.shape[-1], dy.shape[-1])
    shapes.check_shape(op, "main_grad", main_grad, wanted, "[K, N]")
    if x.ndim == 1:
        x, dy = as_row(x), as_row(dy)
    return _wgrad_accumulate(config, x, dy, main_grad)


def _compute_wgrad_accumulate(config, x, dy, main_grad):
    (dw,) = wgrad(config.local, x, (dy,), (main_grad,), out_dtype=main_grad.dtype)
    return dw


_wgrad_accumulate = _differentiable(_compute_wgrad_accumulate, "x", "dy", "main_grad")


def all_reduce(
    x: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Sums `x` over the ranks, and adds an optional bias and residual to the sum.

    Equivalent to `jax.lax.psum(x, axis_name) + bias + residual`, summed in f32 and
    rounded once. Bias and residual are the same on every rank and are added once, after
    the reduction. On GPUs one kernel computes this for few tokens.

    Under `jax.shard_map(check_vma=True)` the backward pass is the identity: neither the
    result nor its gradient varies over `axis_name`, and the gradient of each rank's `x`
    equals the gradient of the result. With `check_vma=False` JAX's convention for
    `jax.lax.psum` holds: the gradient of a replicated value is the sum of the ranks'
    gradients, so the backward pass all-reduces them.

    Transformer Engine: `te.ops.AllReduce`.

    Args:
        x: this rank's summand, `[..., N]` of any rank, or a scalar without `bias`.
        axis_name: the mesh axis, of size P, to sum over.
        bias: `[N]`, the same on every rank.
        residual: array of the shape of `x`, the same on every rank.

    Returns:
        The sum, in the shape and dtype of `x`; the same on every rank.

    Raises:
        ShapeContractError: if `x` is empty or exceeds the capacity of `initialize_ub`,
            if an operand is not f32, bf16 or f16, if bias or residual does not match
            `x` or varies over the ranks, or if the axis is not a manual mesh axis.
        UnsupportedOverlapError: if some mesh axes are not manual in the surrounding
            `jax.shard_map`.
    """
    config = make_call_config("all_reduce", axis_name)
    shapes.check_array(config.label, "x", x)
    shapes.check_float(config.label, x=x)
    shapes.check_not_empty(config.label, "x", x)
    if bias is not None:
        shapes.check_rank(config.label, "x", x, 1)
    shapes.check_addends(config.label, bias, residual, x.shape)
    check_replicated(config, bias=bias, residual=residual)
    axes = config.axes(x, bias, residual)
    bias, residual = vma.pcast_varying(
        (bias, residual), axes - frozenset(config.axis_name)
    )
    x = vma.pcast_varying(x, axes)
    # If the ranks are an axis of `jax.vmap`, the axis may be unbound where a backward
    # rule runs. Therefore no custom rule is used, and JAX differentiates the sum.
    function = _sum_over_ranks if config.is_mapped else _all_reduce
    return function(config, x, bias, residual)


def _sum_over_ranks(config, x, bias, residual):
    return collectives.all_reduce(config.collective, x, bias, residual)


_all_reduce = jax.custom_vjp(_sum_over_ranks, nondiff_argnums=(0,))


def _all_reduce_fwd(config, x, bias, residual):
    y = _all_reduce(config, x, bias, residual)
    return y, (emptied(bias), emptied(residual))


def _all_reduce_bwd(config, addends, dy):
    if config.is_vma_checked:
        dx = vma.pcast_varying(dy, config.axis_name)
    else:
        dx = collectives.all_reduce(config.collective, dy)
    bias, residual = addends
    d_bias = None if bias is None else row_sum(dy).astype(bias.dtype)
    d_residual = None if residual is None else dy.astype(residual.dtype)
    return dx, d_bias, d_residual


_all_reduce.defvjp(_all_reduce_fwd, _all_reduce_bwd)
