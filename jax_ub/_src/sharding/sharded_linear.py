"""Runs linear layers on global arrays, in a `jax.shard_map`.

Inside the caller's `jax.shard_map` the arrays are one rank's shards already, and are
multiplied directly.

The dimension of a kernel that `parallel` does not shard may be sharded over data axes
(FSDP). Forward and backward pass all-gather the shards inside the `shard_map`, so that
the forward pass saves no whole kernels, and gradients are reduce-scattered there.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jax_ub._src import checks, lowering_log
from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub._src.fp8.state import claim_layer_state
from jax_ub._src.parallel import KernelShards
from jax_ub._src.primitives import vma
from jax_ub._src.rules.linear import parallel_linear
from jax_ub._src.rules.operands import as_row, claim_main_grads
from jax_ub._src.runtime import registry
from jax_ub._src.scaled_array import ScaledArray, is_scaled, values_of
from jax_ub._src.sharding.layout import ShardingLayout
from jax_ub._src.sharding.matrices import as_matrix, merge_features, split_features
from jax_ub._src.sharding.specs import (
    activation_specs,
    batch_axes,
    check_context,
    data_axes,
    free_axes,
    indivisible_reason,
    nontrivial_axes,
    of_scaled,
    reshard,
)


def sharded_linear(  # noqa: PLR0913, operands and options of linear layers
    layout: ShardingLayout,
    x: jax.Array,
    kernels: Sequence[jax.Array | ScaledArray],
    biases: Sequence[jax.Array | None] | None = None,
    main_grads: Sequence[jax.Array | None] | None = None,
    fp8_states: Sequence[Any] | None = None,
    *,
    num_in: int = 1,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, ...]:
    """Computes `x @ kernel + bias` for each kernel on arrays sharded by `layout`.

    Args:
        layout: the sharding layout of all kernels. It shards the first input or the
            first output dimension.
        x: activations, `[..., tokens, *in]`; `[*in]` counts as one token.
        kernels: `[*in, *out]` for each layer, or matrices `[out, in]` if
            `layout.rhs_transposed`. They share one all-gather of x. With `layout.fp8`
            they may be FP8; see `ub.fp8.quantize_params`.
        biases: `[*out]` for each kernel; None, or None for each, if there are none.
        main_grads: the f32 accumulators of the kernels' gradients; None like `biases`.
        fp8_states: the states of `layout.fp8`; None like `biases`. Kernels that share
            an all-gather use the first.
        num_in: the number of input dimensions.
        residual: `[..., tokens, *out]`, added to the result; only with a single kernel.
            A row layer adds it before rounding.
        out_dtype: dtype of the products; None takes the dtype of x. With a residual,
            the result has the common dtype of product and residual.

    Returns:
        `[..., tokens, *out]` for each kernel.
    """
    biases, main_grads, fp8_states = map(_present, (biases, main_grads, fp8_states))
    kernels = tuple(kernels)
    layout, shapes = _with_manual_fsdp(layout, kernels, num_in)
    _check_operands(layout, x, shapes, residual, num_in)
    mesh = layout.global_mesh(*map(values_of, kernels), x)
    if mesh is not None:
        check_context(layout.op, mesh)
    is_exported = checks.has_symbolic_sizes(x)
    is_mapped = mesh is not None and not is_exported
    if main_grads is not None and (is_mapped or kernels[0].ndim > 2):
        # This check finds two calls that accumulate into the same main_grad. The ops
        # cannot find such calls, because `shard_map` and reshapes pass new arrays to
        # the ops.
        main_grads = claim_main_grads(layout.op, main_grads, kernels)
    if fp8_states is not None and not _has_separate_calls(layout, kernels):
        fp8_states = fp8_states[0]
    if is_mapped:
        fp8_states = claim_layer_state(layout.op, fp8_states, kernels)
    outs = [layout.in_out(shape)[num_in:] for shape in shapes]
    is_vector = x.ndim == num_in
    operands, out_dtype = _as_matrices(
        layout, (x, kernels, biases, main_grads, residual), num_in, out_dtype
    )
    operands = (*operands, fp8_states)
    x_matrix = operands[0]
    if not layout.is_local() and 0 in x_matrix.shape[:-1] and main_grads is None:
        # The ops reject empty arrays, so the empty result is made here. With a
        # main_grad, the empty arrays are passed to the ops, which raise an error,
        # because an empty result would discard the main_grad.
        ys: Any = _empty_results(layout, mesh, x_matrix, kernels, outs, out_dtype)
    elif mesh is None:
        _check_needs_no_mesh(layout)
        fsdp_axes = layout.manual_fsdp_axes
        ys = _shard_function(layout, fsdp_axes, out_dtype, operands[1])(*operands)
    else:
        layout = _typed_layout(layout, mesh, kernels, num_in)
        if is_exported:
            ys = _without_shard_map(layout, mesh, out_dtype, *operands)
        else:
            layout, repeated = _fitted_layout(layout, mesh, x_matrix)
            # The trace of a layer depends on the settings of `initialize_ub` and of the
            # environment. As a static argument, these settings are part of the cache
            # key of `jax.jit`.
            configuration = registry.configuration()
            ys = _shard_mapped(
                configuration, layout, mesh, out_dtype, repeated, *operands
            )
    ys = ys if isinstance(ys, tuple) else (ys,)
    if is_vector:
        ys = tuple(y[0] for y in ys)
    ys = tuple(split_features(y, out) for y, out in zip(ys, outs, strict=True))
    if residual is None or layout.parallel == "row":
        return ys
    return tuple(_add(y, residual) for y in ys)


# The function is jitted so that an eager call runs one program. It is not inlined,
# because outside jax.jit JAX 0.10.2 evaluates an inlined function's scans and
# jax.checkpoint one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _shard_mapped(configuration, layout, mesh, out_dtype, repeated, *operands):
    """Runs a linear layer in a `shard_map` over all mesh axes that are not manual."""
    x, kernels, _, main_grads, *_ = operands
    batch = batch_axes(layout, mesh, x)
    data = nontrivial_axes(mesh, batch)
    x_spec, residual_spec = activation_specs(layout, data, x.ndim)
    _, y_spec = activation_specs(layout, batch, x.ndim)
    kernel_spec = layout.kernel_spec
    kernel_specs = jax.tree.map(
        functools.partial(_spec_of_kernel, layout, mesh), kernels, is_leaf=is_scaled
    )
    specs = (x_spec, kernel_specs, layout.bias_spec, kernel_spec, residual_spec, P())
    # The mesh axes whose ranks have the same kernel shard but different tokens.
    replicas = tuple(name for name in data if name not in layout.fsdp_axes)
    if layout.parallel is None and layout.sequence_parallel:
        replicas += layout.axes
    fsdp_axes = (*layout.manual_fsdp_axes, *layout.fsdp_axes)
    body = _shard_function(layout, fsdp_axes, out_dtype, kernels)
    if replicas and main_grads is not None:
        body = functools.partial(_with_single_main_grads, body, replicas)
    scope: Any = contextlib.nullcontext()
    if repeated is not None:
        scope = lowering_log.replicating(layout.op, repeated)
    with scope:
        axes = free_axes(layout.op, mesh)
        return jax.shard_map(body, in_specs=specs, out_specs=y_spec, **axes)(
            *reshard(mesh, specs, operands)
        )


def _spec_of_kernel(layout, mesh, kernel):
    """Returns the spec of a kernel, or for an FP8 kernel those of values and scales."""
    if not is_scaled(kernel):
        return layout.kernel_spec
    spec = of_scaled(kernel, layout.kernel_spec)
    for size, entry in zip(kernel.scales.shape, spec.scales, strict=False):
        num_ranks = math.prod(mesh.shape[name] for name in checks.axis_tuple(entry))
        if size % num_ranks:
            raise ShapeContractError(
                f"{layout.op}: kernel {kernel.shape} has {size} scales along K, which "
                f"do not divide into the {num_ranks} ranks of {entry}. Pad K, pass "
                "kernel.source, or use Float8CurrentScaling."
            )
    return spec


def _with_single_main_grads(body, replicas, x, kernels, biases, main_grads, *others):
    """Calls `body` with main_grads on the first replica and with zeros on the others.

    Otherwise JAX would sum the accumulated values of all replicas.
    """
    on_first = functools.partial(_on_first_replica, axes=replicas)
    return body(x, kernels, biases, jax.tree.map(on_first, main_grads), *others)


def _shard_function(layout, fsdp_axes, out_dtype, kernels):
    """Returns the function that computes a layer from one rank's shards.

    `fsdp_axes` are the manual mesh axes that shard the kernels by FSDP. The function's
    arguments are x, kernels, biases, main_grads, the residual and the FP8 states.
    """
    run = functools.partial(
        parallel_linear,
        layout.mode,
        axis_name=layout.axis_name,
        ub_name=layout.ub_name,
        method=layout.method,
        flags=layout.flags,
        out_dtype=out_dtype,
        rhs_transposed=layout.rhs_transposed,
        fp8=layout.fp8,
        shards=KernelShards(fsdp_axes, layout.fsdp_dim) if fsdp_axes else None,
    )
    is_each = isinstance(kernels, tuple) and _has_separate_calls(layout, kernels)
    return functools.partial(_each_kernel, run) if is_each else run


def _has_separate_calls(layout, kernels):
    """Returns whether several kernels need separate calls. AG+GEMM needs only one."""
    return len(kernels) > 1 and not layout.mode.gathers_x


def _each_kernel(run, x, kernels, biases, main_grads, residual, fp8_states):
    none = (None,) * len(kernels)
    each = (kernels, biases or none, main_grads or none, fp8_states or none)
    rows = zip(*each, strict=True)
    return tuple(run(x, *own, residual, state) for *own, state in rows)


def _present(arrays):
    """Returns `arrays` as a tuple, or None if there are no arrays."""
    return None if arrays is None or arrays[0] is None else tuple(arrays)


def _with_manual_fsdp(layout, kernels, num_in):
    """Moves FSDP axes that are manual in a `shard_map` to `manual_fsdp_axes`.

    Returns:
        The layout, and the shapes of the kernels without sharding over these axes.
    """
    shapes = [list(kernel.shape) for kernel in kernels]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(name for name in layout.fsdp_axes if name in manual)
    if not axes:
        return layout, shapes
    for shape in shapes:
        shape[layout.fsdp_dim * num_in] *= layout.num_manual_fsdp()
    others = tuple(name for name in layout.fsdp_axes if name not in manual)
    layout = dataclasses.replace(layout, fsdp_axes=others, manual_fsdp_axes=axes)
    return layout, shapes


def _check_operands(layout, x, shapes, residual, num_in):
    """Raises an error if the shapes of x, kernels and residual do not match."""
    for shape in shapes:
        layout.check_contraction(x, layout.in_out(shape), num_in)
    if residual is None:
        return
    checks.check_array(layout.op, "residual", residual)
    outs = tuple(shapes[0][num_in:])
    # The residual's number of tokens is compared only for global arrays. Inside
    # shard_map, the op compares the number of tokens per rank.
    is_whole = layout.parallel == "row" and not layout.is_local()
    wanted = (*x.shape[: x.ndim - num_in], *outs) if is_whole else outs
    found = residual.shape if is_whole else residual.shape[-len(outs) :]
    if found != wanted:
        raise ShapeContractError(
            f"{layout.op}: residual has shape {residual.shape}, but the result "
            f"{'has' if is_whole else 'ends in'} {wanted}. Pass a residual of the "
            "result's shape."
        )


def _as_matrices(layout, operands, num_in, out_dtype):
    """Reshapes a layer's operands to matrices. Also returns the result's dtype.

    A single kernel is not in a tuple. Only a row layer keeps the residual.
    """
    x, kernels, biases, main_grads, residual = operands
    addend = None
    if residual is not None and layout.parallel == "row":
        out_dtype = jnp.result_type(out_dtype or x.dtype, residual)
        addend = merge_features(residual, kernels[0].ndim - num_in)
    is_vector = x.ndim == num_in
    x = merge_features(x, num_in)
    if is_vector:
        x, addend = as_row((x, addend))
    to_matrix = functools.partial(as_matrix, num_in=num_in)
    kernels = tuple(map(to_matrix, kernels))
    biases = jax.tree.map(lambda bias: bias.reshape(-1), biases)
    main_grads = jax.tree.map(to_matrix, main_grads)
    parameters: list[Any] = [kernels, biases, main_grads]
    if len(kernels) == 1:
        parameters = [each and each[0] for each in parameters]
    return (x, *parameters, addend), out_dtype


def _empty_results(layout, mesh, x, kernels, outs, out_dtype):
    """Returns empty results for an empty x, with the types that other results have."""
    shapes = [(*x.shape[:-1], math.prod(out)) for out in outs]
    ys = [jnp.zeros(shape, out_dtype or x.dtype) for shape in shapes]
    ys = vma.pcast_varying(ys, vma.axes_of(x, *map(values_of, kernels)))
    if mesh is not None and mesh.explicit_axes:
        layout, _ = _fitted_layout(layout, mesh, x)
        _, spec = activation_specs(layout, batch_axes(layout, mesh, x), x.ndim)
        ys = reshard(mesh, [spec] * len(ys), ys)
    return tuple(ys)


def _check_needs_no_mesh(layout):
    if layout.is_local() or layout.parallel is None:
        return
    raise ShapeContractError(
        f"{layout.op}: no mesh is known here: mesh= is not given, jax.set_mesh has set "
        "none (`with mesh:` does not), and the kernel is not sharded over one. Call "
        "the layer under jax.set_mesh(mesh), pass mesh=, or call it inside "
        f"jax.shard_map over {shown(layout.axis_name)}."
    )


def _typed_layout(layout, mesh, kernels, num_in):
    """Checks the shardings of kernels, and returns the layout with their FSDP axes."""
    values = map(values_of, kernels)
    specs = [layout.in_out(jax.typeof(array).sharding.spec) for array in values]
    layout = layout.with_fsdp_of(specs[0], mesh, num_in)
    for kernel, spec in zip(kernels, specs, strict=True):
        # The number of ranks must divide the first of the input or output dimensions,
        # not only their product. For example, it may divide heads * head_dim, but not
        # the heads.
        shape = layout.in_out(kernel.shape)
        layout.check_features((shape[0], shape[num_in]), mesh)
        layout.check_kernel_spec(spec, num_in)
    return layout


def _fitted_layout(layout, mesh, x):
    """Returns the layout, without the shardings that the shape of x does not allow.

    Layers that are not parallel do not shard tokens that do not divide evenly. FSDP
    axes that do not shard the tokens are left out, so that XLA all-gathers the kernels
    when it moves them into the `shard_map`.

    Returns:
        The layout, and why several ranks compute the same rows of x, or None.
    """
    given = layout
    if layout.parallel is None:
        has_axes = set(layout.axes) <= set(mesh.shape)
        if not has_axes or indivisible_reason(layout, mesh, x.shape) is not None:
            layout = dataclasses.replace(layout, sequence_parallel=False)
    reason = indivisible_reason(layout, mesh, x.shape)
    if reason is not None:
        raise ShapeContractError(f"{layout.op}: {reason}")
    repeated = _record_repeated(given, layout, mesh, x.shape)
    fsdp_axes = nontrivial_axes(mesh, layout.fsdp_axes)
    if not set(fsdp_axes) <= set(batch_axes(layout, mesh, x)):
        fsdp_axes = ()
    return dataclasses.replace(layout, fsdp_axes=fsdp_axes), repeated


def _record_repeated(given, layout, mesh, x_shape):
    """Adds the layer to `ub.fallbacks` if several ranks compute the same rows of x.

    They do if a mesh axis shards neither tokens nor features. Returns the reason, or
    None.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    used = {*data_axes(layout, mesh, x_shape), *layout.axes, *manual}
    unused = [name for name in mesh.axis_names if name not in used]
    others = nontrivial_axes(mesh, unused)
    reasons = []
    if others and layout.data_axes is None:
        what = "tokens" if len(x_shape) == 2 else "examples (axis 0)"
        reasons.append(
            f"x {tuple(x_shape)} has {x_shape[0]} {what}, which do not divide into "
            f"the ranks of mesh axes {_sizes(mesh, others)}"
        )
    elif others:
        reasons.append(
            f"data_axes = {layout.data_axes} leaves out mesh axes "
            f"{_sizes(mesh, others)}"
        )
    if given.sequence_parallel and not layout.sequence_parallel:
        axes = [name for name in given.axes if name in mesh.shape]
        if nontrivial_axes(mesh, axes):
            reasons.append(
                f"x {tuple(x_shape)} has {x_shape[-2]} tokens, which do not divide "
                f"into the ranks of mesh axes {_sizes(mesh, axes)}"
            )
    if not reasons:
        return None
    reason = f"{'; '.join(reasons)}: these ranks compute the same"
    lowering_log.record_fallback(layout.op, reason)
    return reason


def _sizes(mesh, names):
    return {name: mesh.shape[name] for name in names}


def _without_shard_map(layout, mesh, out_dtype, *operands):
    """Runs a layer that has symbolic sizes in plain JAX, without a `shard_map`.

    XLA partitions the operations. The sizes come from `jax.export`.
    """
    where, other = "inside jax.shard_map", "leave out the method"
    if mesh.explicit_axes:
        where, other = "on an explicit mesh", "use a mesh of automatic axes"
    reason = (
        f"x {operands[0].shape} is exported with symbolic sizes, which jax cannot find "
        f"{where}; export it once for each size"
    )
    is_fp8 = any(map(is_scaled, jax.tree.leaves(operands[1], is_leaf=is_scaled)))
    if is_fp8:
        other = "pass the arrays from which the kernels were quantized"
    if is_fp8 or mesh.explicit_axes or not layout.may_fall_back():
        raise UnsupportedOverlapError(f"{layout.op}: {reason}, or {other}.")
    *others, state = operands
    kernels, replicated = others[1], layout.replicated()
    sizes = None
    is_shared = isinstance(kernels, tuple) and not _has_separate_calls(layout, kernels)
    if is_shared and layout.fp8 is not None:
        # Kernels that share an FP8 scale and its state are concatenated, and multiplied
        # as a single kernel.
        sizes = [layout.in_out(kernel.shape)[1] for kernel in kernels]
        others[1:4] = (_joined(layout, each) for each in others[1:4])
    with lowering_log.falling_back(layout.op, reason):
        function = _shard_function(
            replicated, layout.manual_fsdp_axes, out_dtype, others[1]
        )
        y = function(*others, state)
    return y if sizes is None else tuple(jnp.split(y, np.cumsum(sizes)[:-1], axis=-1))


def _joined(layout, arrays):
    """Concatenates kernels, or their biases, along the output features."""
    if arrays is None:
        return None
    is_transposed = layout.rhs_transposed and arrays[0].ndim == 2
    return jnp.concatenate(arrays, 0 if is_transposed else -1)


def _add(y, residual):
    """Adds a residual to y. On an explicit mesh, first reshards the residual like y."""
    sharding = jax.typeof(y).sharding
    if residual.shape == y.shape and sharding.mesh.explicit_axes:
        residual = jax.sharding.reshard(residual, sharding)
    return y + residual


def with_output_sharding(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Reshards y to the caller's `out_sharding`. With None, y keeps its sharding."""
    if out_sharding is None:
        return y
    if not isinstance(out_sharding, Sharding | P):
        raise ShapeContractError(
            f"linear: out_sharding = {shown(out_sharding)} is of type "
            f"{type(out_sharding).__name__}. Pass a jax.sharding.Sharding or None."
        )
    if jax.typeof(y).sharding.mesh.explicit_axes:
        return jax.sharding.reshard(y, out_sharding)
    return jax.lax.with_sharding_constraint(y, out_sharding)


def _on_first_replica(main_grad, axes):
    """Returns main_grad on the first replica, and zeros on all other replicas.

    main_grad is replicated, so JAX sums its cotangents, the accumulated values, over
    the replicas. The sum must contain the old main_grad only once.
    """
    first = jax.lax.axis_index(axes) == 0
    others = jax.lax.stop_gradient(jnp.where(first, 0, main_grad))
    # The difference equals jnp.where(first, main_grad, 0), but its derivative is the
    # identity on every replica, whereas jnp.where discards the cotangents of all
    # replicas except the first.
    return main_grad - others
