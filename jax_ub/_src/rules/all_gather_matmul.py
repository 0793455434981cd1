"""`all_gather_matmul` with its derivative, for column-parallel layers.

The layer has sequence parallelism: each rank has some rows (tokens) of x.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_ub._src import checks as shapes
from jax_ub._src.errors import ShapeContractError
from jax_ub._src.methods import Method
from jax_ub._src.parallel import mode_of
from jax_ub._src.primitives.all_gather_matmul import all_gather_matmul as fused
from jax_ub._src.rules import column_gradients
from jax_ub._src.rules import main_grads as accumulators
from jax_ub._src.rules.bias import bias_gradient
from jax_ub._src.rules.call_config import CallConfig, make_call_config, plain_for_f64
from jax_ub._src.rules.layer import check_no_main_grad
from jax_ub._src.rules.vjp import (
    is_zero,
    jitted_rule,
    needs,
    needs_dw,
    present_residuals,
    promote,
    residual_or_placeholder,
    save,
    value_of,
)

OP = "all_gather_matmul"
_MODE = mode_of("column", True)


def all_gather_matmul(  # noqa: PLR0913, pinned
    x: jax.Array,
    w: jax.Array | tuple[jax.Array, ...],
    *,
    axis_name: str | tuple[str, ...],
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    ub_name: str | None = None,
    method: Method | str | None = None,
    return_gathered: bool = False,
    out_dtype: DTypeLike | None = None,
    main_grad: jax.Array | tuple[jax.Array, ...] | None = None,
    rhs_transposed: bool = False,
) -> Any:
    """Multiplies the gathered rows of `x` by this rank's columns of the kernel.

    Equivalent to `jax.lax.all_gather(x, axis_name, axis=-2, tiled=True) @ w + bias`,
    summed in f32 and rounded once.
    The backward pass reduce-scatters the gradient of `x`. For the gradient of `w` it
    gathers `x` again or reads it from the peers' memory. With `return_gathered` the
    forward pass saves the gathered `x` instead, under the checkpoint names
    "jax_ub.gathered" and "jax_ub.<ub_name>.gathered", which a remat policy may drop.

    Transformer Engine: a column-parallel linear with `ub_overlap_ag`.

    Args:
        x: activations, `[..., M/P, K]`: this rank's rows.
        w: kernel, `[K, N/P]`: this rank's columns; or a tuple of kernels, which share
            one gather.
        axis_name: the mesh axis, of size P, to gather over.
        bias: `[N/P]`, or a tuple of one for each kernel.
        ub_name: the call's name in errors and in the configuration of `initialize_ub`.
        method: the method to run by; None takes `JAX_UB_METHOD`, or "auto".
        return_gathered: whether to return the gathered `x`, too.
        out_dtype: dtype of the product; None takes the dtype of `x`.
        main_grad: f32 accumulator of the kernel's gradient, `[K, N/P]`; a tuple if `w`
            is a tuple. Its cotangent is `main_grad + dw`, written in place if its
            buffer is free, and the cotangent of `w` is zero.
        rhs_transposed: whether kernels are stored as `[N/P, K]`, such as this rank's
            shard of an embedding that the output projection reuses. They are read in
            place, and their gradients have the same layout; `w.T` would copy them.

    Returns:
        The product `[..., M, N/P]`, or a tuple of products if `w` is a tuple. With
        `return_gathered`, a pair of that and the gathered x, `[..., M, K]`.

    Raises:
        ShapeContractError: if the operands do not match each other or the mesh, or
            exceed the capacity of `initialize_ub`.
        UnknownNameError: if there is no such method, `initialize_ub` made no overlap
            of that `ub_name`, or a flag is neither true nor false.
        UnsupportedOverlapError: if the given method cannot run here, the name is
            configured for another op, or some mesh axes are not manual in the
            surrounding `jax.shard_map`.
    """
    call_config = make_call_config(OP, axis_name, ub_name, method, mode=_MODE)
    shapes.check_flag(call_config.label, "return_gathered", return_gathered)
    shapes.check_flag(call_config.label, "rhs_transposed", rhs_transposed)
    call_config = dataclasses.replace(call_config, rhs_transposed=rhs_transposed)
    return all_gather_matmul_at(
        call_config,
        x,
        w,
        bias=bias,
        return_gathered=return_gathered,
        out_dtype=out_dtype,
        main_grad=main_grad,
    )


@plain_for_f64
def all_gather_matmul_at(
    call_config: CallConfig,
    x,
    w,
    *,
    bias,
    main_grad,
    return_gathered=False,
    out_dtype=None,
):
    """Runs `all_gather_matmul` with the ranks and methods in `call_config`."""
    is_tuple = isinstance(w, tuple)
    ws = w if is_tuple else (w,)
    biases = _as_tuple(
        call_config.label, call_config.bias_name, bias, is_tuple, len(ws)
    )
    mgs = _as_tuple(call_config.label, "main_grad", main_grad, is_tuple, len(ws))
    out_dtype = _check(call_config, x, ws, biases, mgs, out_dtype)
    call_config = call_config.with_dtypes(x.dtype, out_dtype)
    axes = call_config.axes(x, ws, biases, mgs)
    if mgs is not None:
        mgs = tuple(
            accumulators.prepare(call_config.label, mg, kernel, axes)
            for mg, kernel in zip(mgs, ws, strict=True)
        )
    x, ws, biases = promote((x, ws, biases), axes)
    if call_config.is_mapped:
        check_no_main_grad(call_config, mgs)
        ys, gathered = _forward(call_config, return_gathered, x, ws, biases)
    else:
        ys, gathered = _compiled_column(
            call_config, return_gathered, x, ws, biases, mgs
        )
    y = ys if is_tuple else ys[0]
    return (y, gathered) if return_gathered else y


def _as_tuple(label, name, value, is_tuple, length):
    if value is None:
        return None
    if isinstance(value, tuple) != is_tuple or (is_tuple and len(value) != length):
        found = "one array" if hasattr(value, "shape") else f"a {type(value).__name__}"
        found += f" of {len(value)}" if isinstance(value, tuple) else ""
        wanted = f"a tuple of {length} kernels" if is_tuple else "one kernel"
        raise ShapeContractError(
            f"{label}: {name} is {found}, but w is {wanted}. Pass one {name} for each "
            "kernel, in the same order."
        )
    return value if is_tuple else (value,)


def _check(call_config, x, ws, biases, main_grads, out_dtype):
    if not ws:
        raise ShapeContractError(
            f"{call_config.label}: w is an empty tuple. Pass at least one kernel."
        )
    shapes.check_rank(call_config.label, "x", x)
    for i, w in enumerate(map(call_config.kernel, ws)):
        shapes.check_operands(call_config.label, x, w, takes_f64=call_config.takes_f64)
        shapes.check_contraction(call_config.label, x, w, call_config.num_ranks, "out")
        bias = None if biases is None else biases[i]
        shapes.check_addends(
            call_config.label,
            bias,
            None,
            (w.shape[1],),
            bias_name=call_config.bias_name,
            takes_f64=shapes.is_f64(x),
        )
        main_grad = None if main_grads is None else main_grads[i]
        shapes.check_main_grad(call_config.label, main_grad, ws[i])
    return shapes.check_out_dtype(call_config.label, out_dtype, x.dtype)


def _forward(call_config, return_gathered, x, ws, biases):
    return fused(
        x,
        ws,
        biases,
        rhs_transposed=call_config.rhs_transposed,
        return_gathered=return_gathered,
        out_dtype=call_config.out_dtype,
        **call_config.fused,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _column(call_config, return_gathered, x, ws, biases, main_grads):
    return _forward(call_config, return_gathered, x, ws, biases)


def _column_fwd(call_config, return_gathered, x, ws, biases, main_grads):
    operands = value_of((x, ws, biases, main_grads))
    ys, gathered = _column(call_config, return_gathered, *operands)
    name = call_config.ub_name
    ys = tuple(save(y, "y", name) for y in ys)
    gathered = save(gathered, "gathered", name)
    wants_dw = needs_dw(ws, main_grads)
    residuals = {
        "x": residual_or_placeholder(
            wants_dw and not return_gathered, save(operands[0], "x", name)
        ),
        "gathered": residual_or_placeholder(wants_dw, gathered),
        "ws": residual_or_placeholder(needs(x), operands[1]),
        "biases": residual_or_placeholder(needs(biases), operands[2]),
        "main_grads": residual_or_placeholder(needs(main_grads), operands[3]),
    }
    return (ys, gathered), residuals


def _column_bwd(call_config, return_gathered, residuals, cotangents):
    residuals = present_residuals(residuals)
    dys, d_gathered = cotangents
    live = [i for i, dy in enumerate(dys) if not is_zero(dy)]
    dx, dws = column_gradients.column_gradients(
        call_config, residuals, {i: dys[i] for i in live}, d_gathered
    )
    biases, main_grads = residuals["biases"], residuals["main_grads"]
    dbs = biases and tuple(
        bias_gradient(bias, dys[i]) if i in live else None
        for i, bias in enumerate(biases)
    )
    if main_grads is None:
        return dx, tuple(dws.get(i) for i in range(len(dys))), dbs, None
    # A main_grad's cotangent is its new value, or the old one if its dy is zero.
    return dx, None, dbs, tuple(dws.get(i, mg) for i, mg in enumerate(main_grads))


_column.defvjp(_column_fwd, _column_bwd, symbolic_zeros=True)
_compiled_column = jitted_rule(_column, static_argnums=(0, 1))
