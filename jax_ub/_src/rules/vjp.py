"""The `custom_vjp` of linear layers, with symbolic zeros and optional residuals."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jax_ub._src import dtypes, lowering_log
from jax_ub._src.errors import UnsupportedOverlapError
from jax_ub._src.primitives import vma
from jax_ub._src.primitives.call import Execution
from jax_ub._src.primitives.matmuls import wgrad
from jax_ub._src.reference import sum_dtype
from jax_ub._src.rules.call_config import CallConfig
from jax_ub._src.rules.operands import by_name, check_vmapped_together
from jax_ub._src.scaled_array import (
    ScaledArray,
    is_scaled,
    map_scaled,
    values_of,
    without_source,
)


def differentiable(forward: Callable, gradients: Callable) -> Callable:
    """Makes a linear layer's `custom_vjp` from its forward and gradient functions.

    Args:
        forward: (config, x, ws, biases, residual, *others) -> (ys, gathered). `ws`,
            `biases` and `ys` are tuples with one entry for each kernel. Only the
            backward pass reads the others: main_grads, and the FP8 state.
        gradients: (config, saved, dys, d_gathered) -> (dx, dws). `saved` has "x", or
            "gathered" if the forward pass returned it, to compute kernel gradients;
            "ws", to compute the gradient of x; and "main_grads". Each is None if it is
            not needed. `dys` and `dws` are dicts by the index of the kernel, without
            those whose gradient is zero. With main_grads, dw is main_grad + dw. With an
            FP8 state, `saved` has "state", and there is a third result, its new value.

    Returns:
        A jitted function with the arguments of `forward`, main_grads (a tuple or None)
        and, optionally, the FP8 state of the results' gradients. It must be called
        under `jax.disable_jit(False)`: JAX cannot evaluate a `custom_vjp` with symbolic
        zeros operation by operation in an eager `shard_map`. Inside a traced program
        the jit is inlined.
    """
    rule = jax.custom_vjp(forward, nondiff_argnums=(0,))

    def forward_rule(config, *operands):
        values = jax.tree.map(lambda operand: operand.value, operands)
        x, ws, biases, residual, main_grads, *_ = operands
        check_sources(config.label, **by_name(x, ws if main_grads is None else ()))
        _check_unsharded_features(config, *values[:3])
        ys, gathered = rule(config, *not_reduced(values))
        # With main_grads, the kernel gradients are computed only if main_grads need
        # gradients, to which the kernel gradients are added. stop_gradient on ws would
        # have the same effect, but a scan over layers would save its result as another
        # residual.
        wants_dw = needs(ws if main_grads is None else main_grads)
        name = config.ub_name
        ys = tuple(save(y, "y", name) for y in ys)
        gathered = save(gathered, "gathered", name)
        values = map_scaled(without_source, values)
        # With an FP8 recipe, x already has this checkpoint name. If it got the name
        # again, a checkpoint policy would save x twice.
        x_saved = save(values[0], "x", name) if config.fp8 is None else values[0]
        saved = {
            # The wgrad reads the gathered x instead, if the forward pass has stored it.
            "x": residual_or_placeholder(wants_dw and gathered is None, x_saved),
            "gathered": residual_or_placeholder(wants_dw, gathered),
            "ws": residual_or_placeholder(needs(x), values[1]),
            "biases": residual_or_placeholder(needs(biases), values[2]),
            "residual": residual_or_placeholder(needs(residual), emptied(values[3])),
            "main_grads": residual_or_placeholder(needs(main_grads), values[4]),
        }
        if main_grads is not None and needs(ws) and not wants_dw:
            warn_of_constant_main_grad(config.label, "main_grad=")
        if len(values) > 5:
            saved["state"] = values[5]
            if values[5] and wants_dw and not needs(tuple(operands[5].values())):
                warn_of_constant_state(config.label)
        return (ys, gathered), saved

    def backward_rule(config, saved, cotangents):
        saved = {
            name: value if jax.tree.leaves(value) else None
            for name, value in from_saved(saved).items()
        }
        dys, d_gathered = cotangents
        live = {i: dy for i, dy in enumerate(dys) if not is_zero(dy)}
        biases, residual, main_grads = (
            saved[name] for name in ("biases", "residual", "main_grads")
        )
        of_whole = dataclasses.replace(config, shards=None)
        if config.shards is not None:
            # The barrier makes XLA gather the kernels only when dy is known. Otherwise
            # XLA might reuse the kernels that the forward pass gathered, which would
            # then stay in memory until the backward pass.
            shards, _ = lax.optimization_barrier((saved["ws"], live))
            saved["ws"] = whole_kernels(config, shards)
            saved["main_grads"] = _padded_with_zeros(config, main_grads)
        dx, dws, *state = gradients(of_whole, saved, live, d_gathered)
        dbs = biases and tuple(
            row_sum(live[i]).astype(bias.dtype) if i in live else None
            for i, bias in enumerate(biases)
        )
        has_residual = residual is not None and bool(live)
        d_residual = live[0].astype(residual.dtype) if has_residual else None
        dws = _reduce_scattered(config, dws)
        if main_grads is None:
            dws = tuple(map(dws.get, range(len(dys))))
            return dx, dws, dbs, d_residual, None, *state
        # The cotangent of main_grad is the accumulated value. If dy is zero, this is
        # main_grad itself.
        sums = tuple(dws.get(i, main_grad) for i, main_grad in enumerate(main_grads))
        return dx, None, dbs, d_residual, sums, *state

    rule.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return jax.jit(rule, static_argnums=0, inline=True)


def whole_kernels(config: CallConfig, ws: Any) -> Any:
    """All-gathers kernels that FSDP shards. Returns other kernels, or None, unchanged.

    The kernels may be FP8. The result has no sources, which receive gradients.
    """
    shards = config.shards
    if shards is None or ws is None:
        return ws
    gather = functools.partial(
        lax.all_gather, axis_name=shards.axes, axis=shards.dim, tiled=True
    )

    def whole(w):
        if not is_scaled(w):
            return gather(w)
        values, scales = map(_as_bits, (w.values, w.scales))
        # Scales per column are sharded only if the columns are. If FSDP shards the
        # contracted dimension, every rank already has the scales of all columns.
        is_per_column = (
            w.scales.ndim and w.scales.shape[shards.dim] == w.shape[shards.dim]
        )
        is_sharded = shards.dim != config.contracted_dim and is_per_column
        if w.scaling == "block" or is_sharded:
            scales = gather(scales)
        return ScaledArray(
            _from_bits(gather(values), w.values), _from_bits(scales, w.scales)
        )

    return tuple(map(whole, ws))


def _padded_with_zeros(config, main_grads):
    """Pads shards of gradient accumulators with zeros to the shape of whole kernels.

    The zeros are in the places of the peers' shards. Each rank adds its gradient to the
    padded arrays, and these sums are reduce-scattered, so every shard of a main_grad is
    counted once.
    """
    axes, dim = config.shards.axes, config.shards.dim

    def padded(main_grad):
        shape = list(main_grad.shape)
        start = lax.axis_index(axes) * shape[dim]
        shape[dim] *= lax.axis_size(axes)
        zeros = jnp.zeros(shape, main_grad.dtype)
        zeros = vma.pcast_varying(zeros, vma.axes_of(main_grad))
        return lax.dynamic_update_slice_in_dim(zeros, main_grad, start, dim)

    return jax.tree.map(padded, main_grads)


def _reduce_scattered(config, dws):
    """Reduce-scatters kernel gradients over the ranks among which FSDP shards them."""
    if config.shards is None:
        return dws
    axes, dim = config.shards.axes, config.shards.dim
    return jax.tree.map(
        lambda dw: lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True), dws
    )


def mapped_together(results: Any, operands: Any) -> Any:
    """Returns `results`. If `jax.vmap` maps any of the operands, it maps all results.

    A `custom_vjp` with several results needs it. If a result were not mapped, while
    others are, the backward rule would count its cotangent once per example, so JAX
    raises an error. The call adds nothing to the compiled program.
    """

    @custom_vmap
    def same(results, operands):
        return results

    @same.def_vmap
    def same_of_mapped(axis_size, is_mapped, results, operands):
        if not any(jax.tree.leaves(is_mapped)):
            # No operand is mapped if `jax.vmap` maps only the tangents of a `jax.jvp`.
            # Calling `same` again would then recurse without end.
            return results, is_mapped[0]

        def repeated(result, is_mapped):
            shape = (axis_size, *result.shape)
            return result if is_mapped else jnp.broadcast_to(result, shape)

        results = jax.tree.map(repeated, results, is_mapped[0])
        # `same` is called again so that the batching rule also runs for each enclosing
        # jax.vmap.
        return same(results, operands), jax.tree.map(lambda _: True, results)

    return same(results, operands)


def warn_of_constant_main_grad(label: str, option: str) -> None:
    """Warns once that a program accumulates weight gradients but discards the sum.

    The program differentiates a kernel but not its main_grad, whose gradient is the new
    sum.
    """
    lowering_log.warn_once(
        "main_grad",
        f"{label}: JAX takes the gradient of the kernel, which is zero, since it is "
        "added to main_grad, but not of main_grad. Take the gradient of main_grad, "
        f"which is its new value, or leave out {option}.",
        "docs/flax.md",
    )


def warn_of_constant_state(label: str) -> None:
    """Warns once that the FP8 scales of a program never change.

    The program differentiates a kernel but not its FP8 state, whose gradient is the new
    state.
    """
    lowering_log.warn_once(
        "FP8 state",
        f"{label}: JAX takes the gradient of the kernel, but not of the FP8 state, "
        "which is the state's new value, so the scales never change. Take the gradient "
        "of the state, too, and pass it to ub.fp8.apply_updates.",
        "docs/fp8.md",
    )


def accumulation(config: CallConfig, dys, main_grads):
    """Returns the main_grads to which wgrad GEMMs add, and the dtype of their results.

    The dtype is f32 with accumulators. `main_grads` is None or has one entry for each
    dy.
    """
    if main_grads is None:
        return None, config.dw_dtype or config.dtype
    pairs = zip(main_grads, map(values_of, dys), strict=True)
    checked = tuple(check_vmapped_together(config.label, *pair) for pair in pairs)
    return checked, jnp.float32


def kernel_gradients(
    config: CallConfig, execution: Execution, x, dys, main_grads, gather=None
) -> tuple[jax.Array, ...]:
    """Computes the gradient of each kernel, `x^T dy_i`, plus its main_grad.

    `gather` is the operand that the calls all-gather, "x" or "dy", or None.
    """
    main_grads, dtype = accumulation(config, dys, main_grads)
    options = {"scale": config.scale, "out_dtype": dtype}
    if not config.rhs_transposed:
        return wgrad(execution, x, dys, main_grads, gather=gather, **options)
    # The gradient of a kernel [out, in] is dy_i^T x, so dy_i is the first operand of
    # the wgrad and x the second one. Each kernel needs a separate call.
    options["gather"] = {"x": "dy", "dy": "x", None: None}[gather]
    return tuple(
        wgrad(execution, dy, (x,), main_grads and (main_grads[i],), **options)[0]
        for i, dy in enumerate(dys)
    )


def _check_unsharded_features(config, x, ws, biases):
    """Raises an error if an explicit mesh shards features outside of `jax.shard_map`.

    JAX chooses the shardings of gradients there, but not those of a `custom_vjp`.
    """
    operands = by_name(x, ws)
    if biases:
        operands[config.bias_name] = biases[0]
    for name, operand in operands.items():
        spec = jax.typeof(values_of(operand)).sharding.spec
        if any(spec[-1:] if name == "x" else spec):
            raise UnsupportedOverlapError(
                f"{config.label}: an explicit mesh shards the features of {name} "
                f"({spec}). With fp8, ub.ScaledArray or main_grad, such a layer has no "
                "gradients outside of jax.shard_map. Call it there, or use a layer of "
                "jax_ub.flax."
            )


def check_sources(label: str, **operands) -> None:
    """Raises an error if an FP8 operand needs a gradient but has no source array.

    Only the `source` of a `ScaledArray` can receive a gradient. The operands are
    wrapped as by `defvjp(symbolic_zeros=True)`.
    """
    for name, operand in operands.items():
        if not is_scaled(operand) or operand.source is not None:
            continue
        if operand.values.perturbed or operand.scales.perturbed:
            raise UnsupportedOverlapError(
                f"{label}: {name} is FP8 and has no source to receive a gradient. Make "
                "it with ub.quantize, or apply jax.lax.stop_gradient to it."
            )


def as_factor(dy, dtype):
    """Casts dy to the dtype of x and w, for a GEMM. Returns an FP8 dy unchanged."""
    return dy if is_scaled(dy) else dy.astype(dtype)


def row_sum(dy: jax.Array) -> jax.Array:
    """Returns the sum of dy [..., M, N] over all rows, [N] in f32 (f64 for f64)."""
    return jnp.sum(dy, axis=tuple(range(dy.ndim - 1)), dtype=sum_dtype(dy.dtype))


def save(value, name: str, ub_name: str | None = None):
    """Names an array with `checkpoint_name`, for the policies of `jax.checkpoint`.

    None stays None.

    With a `ub_name` the value has two names, such as "jax_ub.y" and "jax_ub.qkv.y", so
    that a policy can select the values of all calls or of one.
    """
    if value is None:
        return None
    named = checkpoint_name(jax.tree.map(_as_bits, value), f"jax_ub.{name}")
    if ub_name is not None:
        named = checkpoint_name(named, f"jax_ub.{ub_name}.{name}")
    return jax.tree.map(_from_bits, named, value)


def not_reduced(tree: Any) -> Any:
    """Copies arrays so that `jax.checkpoint` does not round their FP8 values.

    `jax.checkpoint` saves variables of the traced program for the backward pass, or for
    all iterations of a scan. If another call reads a saved floating-point variable, it
    applies `reduce_precision` to it, which replaces float8_e4m3fn values above 240 by
    NaN, and subnormal ones by zero. Each FP8 array returned here is a new variable,
    which the caller passes to one call only. XLA removes the conversions made here.
    """
    return jax.tree.map(lambda array: _from_bits(_as_bits(array), array), tree)


def _as_bits(array):
    """Converts FP8 values or e8m0 scales to uint8. Returns other arrays unchanged."""
    if array.dtype in dtypes.FP8 or array.dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(array, jnp.uint8)
    return array


def _from_bits(bits, like):
    if bits.dtype == like.dtype:
        return bits
    return lax.bitcast_convert_type(bits, like.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class _SavedBits:
    """The bits of an FP8 residual, as uint8, and its dtype.

    A scan stacks the residuals of its iterations in one array. XLA:CPU would convert a
    whole stack of FP8 arrays to f16 and back in each iteration.
    """

    bits: Any
    dtype: Any


def to_saved(tree: Any) -> Any:
    """Converts FP8 arrays among the residuals to `_SavedBits`, which are saved."""

    def convert(array):
        bits = _as_bits(array)
        return array if bits is array else _SavedBits(bits, array.dtype)

    return jax.tree.map(convert, tree)


def from_saved(tree: Any) -> Any:
    """Inverts `to_saved`, and replaces each placeholder by None."""

    def convert(leaf):
        bits = leaf.bits if _is_bits(leaf) else leaf
        if is_placeholder(bits):
            return None
        return lax.bitcast_convert_type(bits, leaf.dtype) if _is_bits(leaf) else leaf

    return jax.tree.map(convert, tree, is_leaf=_is_bits)


def _is_bits(value):
    return isinstance(value, _SavedBits)


def residual_or_placeholder(wanted: bool, value):
    """Returns a residual if the backward pass needs it, and empty arrays otherwise.

    The empty arrays, called placeholders, keep the residuals' tree structure.

    JAX stores one tree structure of residuals per jaxpr, although each use of the jaxpr
    may be differentiated with respect to different operands. So an omitted residual
    must not change the structure. A placeholder is a slice of the value that it
    replaces, so that `jax.vmap` maps both over the same axes.
    """
    value = to_saved(value)
    return value if wanted else jax.tree.map(_as_placeholder, value)


def _as_placeholder(value):
    rows = value if value.ndim else value[None]
    return lax.slice_in_dim(rows, 0, 0).astype(bool)


def emptied(array: jax.Array | None) -> jax.Array | None:
    """Returns an empty array with the dtype of `array`. None stays None."""
    return None if array is None else array.reshape(-1)[:0]


def placeholder() -> jax.Array:
    """Returns an empty array, which replaces a residual that is not saved."""
    return jnp.zeros(0, bool)


def is_placeholder(leaf) -> bool:
    """Returns whether an array is empty because its residual was not saved.

    An empty array of booleans counts as one, too; it holds no information either.
    """
    return leaf.dtype == bool and leaf.size == 0


def needs(tree) -> bool:
    """Returns whether JAX needs the gradient of any of these operands.

    The operands are wrapped as by `defvjp(symbolic_zeros=True)`. The gradient of a
    `ScaledArray` is the gradient of its source.
    """
    if isinstance(tree, tuple):
        return any(needs(leaf) for leaf in tree)
    if is_scaled(tree):
        return needs(tree.source)
    return tree is not None and tree.perturbed


def is_zero(cotangent) -> bool:
    return cotangent is None or isinstance(cotangent, SymbolicZero)
