"""Runs a dense layer on global arrays, inside a `jax.shard_map` over the mesh.

Inside the caller's `jax.shard_map` the arrays are one rank's shards already, and are
multiplied directly. On global arrays the layer runs in a `shard_map` with these
partition specs:

| parallel | x | kernel | bias | y |
|---|---|---|---|---|
| "column" | `[data, tp, -]` | `[-, tp]` | `[tp]` | `[data, -, tp]` |
| "row" | `[data, -, tp]` | `[tp, -]` | `[-]` | `[data, tp, -]` |
| None | `[data, tp, -]` | `[-, -]` | `[-]` | `[data, tp, -]` |

`data` stands for the data axes. It is omitted if they do not divide the leading axis.
Without sequence parallelism no token axis is sharded over `tp`. A layer that is not
parallel does not shard tokens over `tp` either if `tp` does not divide them. If x is
`[tokens, features]`, its tokens are sharded over `(data..., tp)`.

The kernel's other dimension may be sharded over data axes (FSDP). The rank's shard is
all-gathered inside the `shard_map`, so that its gradient is reduce-scattered there.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ub._src import lowering_log
from jax_ub._src.checks import has_symbolic_sizes
from jax_ub._src.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub._src.rules import main_grads
from jax_ub._src.rules.all_gather_matmul import all_gather_matmul
from jax_ub._src.rules.fsdp import gather_kernels, remat_gathers
from jax_ub._src.rules.linear import linear_without_gather
from jax_ub._src.rules.matmul_all_reduce import matmul_all_reduce
from jax_ub._src.rules.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub._src.runtime import registry
from jax_ub._src.sharding.layout import AnyMesh, ShardingLayout


def sharded_linear(
    sharding_layout: ShardingLayout,
    x: jax.Array,
    kernel: jax.Array | tuple[jax.Array, ...],
    bias: jax.Array | tuple[jax.Array, ...] | None = None,
    main_grad: jax.Array | tuple[jax.Array, ...] | None = None,
    *,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Any:
    """Multiplies x [..., K] by kernel [K, N] with the sharding of `sharding_layout`.

    Args:
        sharding_layout: the sharding layout of the layer.
        x: activations, `[..., tokens, K]`; a vector `[K]` counts as one token.
        kernel: `[K, N]`, or `[N, K]` if `sharding_layout.rhs_transposed`. It is global,
            or this rank's shard if the axis is manual. The kernels of a tuple share one
            all-gather of x.
        bias: `[N]` or None, sharded by `sharding_layout.bias_spec`; a tuple if `kernel`
            is a tuple.
        main_grad: f32 `[K, N]` or None, sharded like the kernel; a tuple if `kernel` is
            a tuple.
        residual: `[..., tokens, N]` or None, added to the result of a row layer before
            rounding.
        out_dtype: dtype of the result; None takes the dtype of `x`.

    Returns:
        `[..., tokens, N]`, or a tuple of such arrays if `kernel` is a tuple.

    Raises:
        ShapeContractError: if no mesh is known, the arrays do not divide by its number
            of ranks, or their shapes do not match.
        UnknownNameError: if the mesh does not have one of the axes.
        UnsupportedOverlapError: if the sizes of x are symbolic, and the mesh is
            explicit or a method is given.
    """
    if x.ndim == 1:
        call = functools.partial(sharded_linear, sharding_layout, x[None], kernel, bias)
        residual = None if residual is None else residual[None]
        y = call(main_grad, residual=residual, out_dtype=out_dtype)
        return jax.tree.map(lambda y: y[0], y)
    operands = (x, kernel, bias, main_grad, residual)
    if sharding_layout.is_local():
        return _multiply(sharding_layout, out_dtype, *operands)
    if 0 in x.shape[:-1] and main_grad is None:
        # The ops reject empty arrays. With a main_grad the call goes on to their error,
        # since a constant result would discard the main_grad.
        shape, dtype = x.shape[:-1], out_dtype or x.dtype
        out = 0 if sharding_layout.rhs_transposed else 1
        return jax.tree.map(lambda w: jnp.zeros((*shape, w.shape[out]), dtype), kernel)
    kernels = kernel if isinstance(kernel, tuple) else (kernel,)
    mesh = sharding_layout.find_mesh(*kernels, x)
    if mesh is None and sharding_layout.parallel is None:
        return _multiply(sharding_layout, out_dtype, *operands)
    if mesh is None:
        raise ShapeContractError(
            f"{sharding_layout.op}: no mesh is known here: none was given, "
            f"jax.set_mesh has "
            "set none (`with mesh:` does not), and the kernel shows none. Call it "
            "under jax.set_mesh(mesh), pass mesh=, or call it inside jax.shard_map "
            f"over {shown(sharding_layout.axis_name)}."
        )
    specs = [sharding_layout.in_out(jax.typeof(each).sharding.spec) for each in kernels]
    sharding_layout = sharding_layout.with_fsdp_of(specs[0], mesh)
    for each, spec in zip(kernels, specs, strict=True):
        sharding_layout.check_features(sharding_layout.in_out(each.shape), mesh)
        sharding_layout.check_kernel_spec(spec)
    if has_symbolic_sizes(x):
        return _on_no_mesh(sharding_layout, mesh, out_dtype, *operands)
    asked, sharding_layout = (
        sharding_layout,
        _leave_whole(sharding_layout, mesh, x.shape),
    )
    reason = indivisible_reason(sharding_layout, mesh, x.shape)
    if reason is not None:
        raise ShapeContractError(f"{sharding_layout.op}: {reason}")
    if main_grad is not None:
        # The op inside the shard_map would see another tracer of the main_grad, and so
        # could not detect that two calls use it. It is checked here instead.
        prepare = functools.partial(main_grads.prepare, sharding_layout.op, axes=())
        main_grad = jax.tree.map(prepare, main_grad, kernel)
    operands = (x, kernel, bias, main_grad, residual)
    repeated = _record_repeated(asked, sharding_layout, mesh, x.shape)
    # Part of jit's cache key, because the layer looks up its name and method in the
    # configuration while it is traced.
    configuration = registry.configuration()
    return _on_mesh(
        configuration, sharding_layout, mesh, out_dtype, repeated, *operands
    )


def with_output_sharding(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Reshards y to the caller's `out_sharding`; None keeps y's sharding."""
    if out_sharding is None:
        return y
    if not isinstance(out_sharding, Sharding | P):
        raise ShapeContractError(
            f"linear: out_sharding = {shown(out_sharding)} is of type "
            f"{type(out_sharding).__name__}. Pass a jax.sharding.Sharding or None."
        )
    if AxisType.Explicit in jax.typeof(y).sharding.mesh.axis_types:
        return jax.sharding.reshard(y, out_sharding)
    return jax.lax.with_sharding_constraint(y, out_sharding)


def as_matrix(kernel: jax.Array, num_in: int) -> jax.Array:
    """Reshapes a kernel `[*in, *out]`, with `num_in` in dimensions, to a matrix."""
    if kernel.ndim == 2:
        return kernel
    ins, outs = kernel.shape[:num_in], kernel.shape[num_in:]
    # In two steps, because with explicit axes a JAX reshape can merge dimensions in one
    # place only.
    return kernel.reshape(math.prod(ins), *outs).reshape(
        math.prod(ins), math.prod(outs)
    )


def split_features(y: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Reshapes y [..., N] to [..., *sizes]; the first new axis is sharded as N was."""
    shape, sharding = (*y.shape[:-1], *sizes), jax.typeof(y).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return y.reshape(shape)
    # Given explicitly: if the first new dimension had size 1, JAX would shard another.
    spec = P(*sharding.spec, *[None] * (len(sizes) - 1))
    return jax.lax.reshape(y, shape, out_sharding=spec)


def _leave_whole(sharding_layout, mesh, x_shape):
    """Disables sequence parallelism if the ranks do not divide the tokens evenly.

    Only layers that are not parallel allow this; other layers raise an error later.
    """
    if sharding_layout.parallel is not None:
        return sharding_layout
    splits = set(sharding_layout.axes) <= set(mesh.shape)
    if splits and indivisible_reason(sharding_layout, mesh, x_shape) is None:
        return sharding_layout
    return dataclasses.replace(sharding_layout, sequence_parallel=False)


def indivisible_reason(
    sharding_layout: ShardingLayout, mesh: AnyMesh, x_shape: Sequence[int]
) -> str | None:
    """Returns why the ranks cannot divide x [..., tokens, K] evenly, or None."""
    data_axes = nontrivial_axes(mesh, _data_axes(sharding_layout, mesh, x_shape))
    num_data = math.prod(mesh.shape[name] for name in data_axes)
    num_tp = sharding_layout.axis_size(mesh) if sharding_layout.sequence_parallel else 1
    num_parts = num_tp * num_data if len(x_shape) == 2 else num_tp
    if x_shape[-2] % num_parts:
        padded = math.ceil(x_shape[-2] / num_parts) * num_parts
        return (
            f"x {tuple(x_shape)} has {x_shape[-2]} tokens (axis -2), which do not "
            f"divide into {num_parts} ranks. Pad to {padded} tokens, or use "
            "sequence_parallel=False."
        )
    if len(x_shape) > 2 and x_shape[0] % num_data:
        return (
            f"x {tuple(x_shape)} has a leading axis of {x_shape[0]}, which does not "
            f"divide into the {num_data} ranks of data_axes = {data_axes}. Pass other "
            "data_axes, or data_axes=()."
        )
    return None


def _record_repeated(asked, sharding_layout, mesh, x_shape):
    """Records a fallback if some mesh axes shard neither tokens nor features.

    The ranks along these axes compute the same rows of x.

    Args:
        asked: the layout that the caller passed.
        sharding_layout: the layout that is used.
        mesh: the mesh.
        x_shape: the shape of x, `[..., tokens, K]`.

    Returns:
        Why these ranks compute the same rows; None if there are no such ranks.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    used = {*_data_axes(sharding_layout, mesh, x_shape), sharding_layout.axis_name}
    unused = [name for name in mesh.axis_names if name not in {*used, *manual}]
    others = nontrivial_axes(mesh, unused)
    reasons = []
    if others and sharding_layout.data_axes is None:
        what = "tokens" if len(x_shape) == 2 else "examples (axis 0)"
        reasons.append(
            f"x {tuple(x_shape)} has {x_shape[0]} {what}, which do not divide into "
            f"the ranks of mesh axes {_sizes(mesh, others)}"
        )
    elif others:
        reasons.append(
            f"data_axes = {sharding_layout.data_axes} leaves out mesh axes "
            f"{_sizes(mesh, others)}"
        )
    if asked.sequence_parallel and not sharding_layout.sequence_parallel:
        axes = [name for name in (asked.axis_name,) if name in mesh.shape]
        if nontrivial_axes(mesh, axes):
            reasons.append(
                f"x {tuple(x_shape)} has {x_shape[-2]} tokens, which do not divide "
                f"into the ranks of mesh axes {_sizes(mesh, axes)}"
            )
    if not reasons:
        return None
    reason = f"{'; '.join(reasons)}: these ranks compute the same"
    lowering_log.record_fallback(sharding_layout.op, reason)
    return reason


def _sizes(mesh, names):
    return {name: mesh.shape[name] for name in names}


def _on_no_mesh(sharding_layout, mesh, out_dtype, x, *operands):
    """Runs a layer with symbolic sizes by plain JAX operations, without `shard_map`.

    XLA partitions them. The sizes come from `jax.export`.
    """
    where, other = "inside jax.shard_map", "leave out the method"
    is_explicit = bool(_explicit_axes(mesh))
    if is_explicit:
        where, other = "on an explicit mesh", "use a mesh of automatic axes"
    reason = (
        f"x {x.shape} is exported with symbolic sizes, which jax cannot find {where}; "
        "export it once for each size"
    )
    if is_explicit or not sharding_layout.may_fall_back():
        raise UnsupportedOverlapError(f"{sharding_layout.op}: {reason}, or {other}.")
    with lowering_log.falling_back(sharding_layout.op, reason):
        return _multiply(sharding_layout.whole(), out_dtype, x, *operands)


# Jitted, so that an eager call is one program. Not inlined, because outside jax.jit JAX
# 0.10.2 evaluates the operations of scans and jax.checkpoint one by one.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _on_mesh(configuration, sharding_layout, mesh, out_dtype, repeated, *operands):
    """Runs the layer in a `shard_map` over the mesh axes, except manual ones."""
    x = operands[0]
    shown = batch_axes(sharding_layout, mesh, x)
    data_axes = nontrivial_axes(mesh, shown)
    x_spec, y_spec = _activation_specs(sharding_layout, data_axes, x.ndim)
    # If the tokens are not sharded over the FSDP axes, XLA all-gathers the kernels when
    # it moves them into the shard_map.
    fsdp_axes = tuple(
        name for name in sharding_layout.fsdp_axes if mesh.shape[name] > 1
    )
    if not set(fsdp_axes) <= set(data_axes):
        fsdp_axes = ()
    sharding_layout = dataclasses.replace(sharding_layout, fsdp_axes=fsdp_axes)
    kernel_spec = sharding_layout.kernel_spec
    specs = (x_spec, kernel_spec, sharding_layout.bias_spec, kernel_spec, y_spec)
    _, out_spec = _activation_specs(sharding_layout, shown, x.ndim)
    # The mesh axes whose ranks have the same kernel shard but different tokens.
    replicas = tuple(name for name in data_axes if name not in fsdp_axes)
    if sharding_layout.parallel is None and sharding_layout.sequence_parallel:
        replicas += sharding_layout.axes

    def local(x, kernel, bias, main_grad, residual):
        if replicas:
            on_first = functools.partial(_on_first_replica, axes=replicas)
            main_grad = jax.tree.map(on_first, main_grad)
        if fsdp_axes:
            along = {"axes": fsdp_axes, "dim": sharding_layout.fsdp_dim}
            kernel, main_grad = gather_kernels(x, kernel, main_grad, **along)
        return _multiply(
            sharding_layout, out_dtype, x, kernel, bias, main_grad, residual
        )

    if fsdp_axes:
        local = remat_gathers(local, fsdp_axes)
    if repeated is None:
        return shard_map_operands(local, mesh, specs, out_spec, *operands)
    with lowering_log.replicating(sharding_layout.op, repeated):
        return shard_map_operands(local, mesh, specs, out_spec, *operands)


def shard_map_operands(
    local: Callable, mesh: AnyMesh, in_specs: tuple, out_specs: Any, *operands: Any
) -> Any:
    """Calls `local` in a `shard_map` over all mesh axes that are not manual yet.

    Args:
        local: the function of one rank's shards.
        mesh: the mesh. If it has manual axes, it is the mesh of the enclosing
            `shard_map`.
        in_specs: one partition spec per operand, for all arrays in the operand.
        out_specs: the partition spec of the result.
        *operands: trees of arrays. With explicit axes they are resharded to `in_specs`.
    """
    context = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        local,
        mesh=None if mesh == context else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(context.manual_axes),
    )(*map(functools.partial(_place, mesh), operands, in_specs))


# The layers whose forward pass communicates, by the op of the table of parallel modes.
_FUSED: dict[str, Callable] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}


def _multiply(sharding_layout, out_dtype, x, kernel, bias, main_grad, residual):
    """Runs the layer on this rank's shards, with the op for its kind of parallelism."""
    is_parallel = sharding_layout.parallel is not None
    options = {
        "axis_name": sharding_layout.axis_name if is_parallel else None,
        "method": sharding_layout.flagged_method,
        "ub_name": sharding_layout.ub_name,
        "rhs_transposed": sharding_layout.rhs_transposed,
    }
    if residual is not None:
        options["residual"] = residual
    fused = _FUSED.get(sharding_layout.mode.op, linear_without_gather)

    def multiply(w, bias, main_grad):
        given = {"main_grad": main_grad, "out_dtype": out_dtype, **options}
        return fused(x, w, bias=bias, **given)

    if isinstance(kernel, tuple) and fused is not all_gather_matmul:
        none = (None,) * len(kernel)  # the kernels share no all-gather: one call each
        return tuple(map(multiply, kernel, bias or none, main_grad or none))
    return multiply(kernel, bias, main_grad)


def nontrivial_axes(mesh: AnyMesh, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the mesh axes among `names` that have more than one rank."""
    return tuple(name for name in names if mesh.shape[name] > 1)


def batch_axes(
    sharding_layout: ShardingLayout, mesh: AnyMesh, x: jax.Array
) -> tuple[str, ...]:
    """Returns the mesh axes that shard the leading axis of x and of the result.

    If x is sharded over the same ranks already, they are the axes of x's type, in its
    order and with axes of one rank. Otherwise the result's type could differ from the
    type of x on an explicit mesh.
    """
    axes = _data_axes(sharding_layout, mesh, x.shape)
    entry = jax.typeof(x).sharding.spec[0]
    names = entry if isinstance(entry, tuple) else (entry,)
    others = {*mesh.shape} - {*sharding_layout.axes}
    own = tuple(name for name in names if name in others)
    lies_so = {*nontrivial_axes(mesh, own)} == {*nontrivial_axes(mesh, axes)}
    return own if own and lies_so and sharding_layout.data_axes is None else axes


def _data_axes(sharding_layout, mesh, x_shape):
    """Returns the data-parallel mesh axes, over which the leading axis of x is sharded.

    They must divide its size, unless the caller has named them.

    Explicit axes of one rank are included.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    explicit = _explicit_axes(mesh)
    chosen = sharding_layout.data_axes
    names = mesh.axis_names if chosen is None else chosen
    for name in names:
        if name not in mesh.shape:
            raise UnknownNameError(
                f"{sharding_layout.op}: data_axes has {shown(name)}, which is not an "
                f"axis of "
                f"the mesh {dict(mesh.shape)}. {nearest(name, mesh.axis_names)}"
            )
    axes = tuple(
        name
        for name in names
        if name not in sharding_layout.axes
        and name not in manual
        and (mesh.shape[name] > 1 or name in explicit)
    )
    if chosen is not None:
        return axes
    # The tokens of x [tokens, features] are sharded over the tensor-parallel axis, too.
    shares = len(x_shape) == 2 and sharding_layout.sequence_parallel
    num_tp = sharding_layout.axis_size(mesh) if shares else 1
    num_data = math.prod(mesh.shape[name] for name in axes)
    return axes if x_shape[0] % (num_data * num_tp) == 0 else ()


def _activation_specs(sharding_layout, data_axes, ndim):
    """Returns the partition specs of the layer's input x and output y.

    Both have shape [..., tokens, features].
    """
    lead = [data_axes or None, *[None] * (ndim - 3)] if ndim > 2 else []
    over_data = data_axes if ndim == 2 else ()

    def spec(layout):
        by_tokens, by_features = layout
        tokens = (*over_data, *(sharding_layout.axes if by_tokens else ()))
        features = sharding_layout.axis_name if by_features else None
        return P(*lead, tokens or None, features)

    return spec(sharding_layout.mode.x), spec(sharding_layout.mode.y)


def _place(mesh, operand, spec):
    """Reshards an operand's arrays to `spec`, as explicit mesh axes require.

    `shard_map` reshards its operands over automatic axes by itself, but rejects
    operands that are sharded differently over explicit axes.
    """
    explicit = _explicit_axes(mesh)
    if not explicit:
        return operand
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    kept = (tuple(name for name in entry if name in explicit) for entry in entries)
    layout = NamedSharding(mesh, P(*(entry or None for entry in kept)))
    return jax.tree.map(lambda array: jax.sharding.reshard(array, layout), operand)


def _explicit_axes(mesh):
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def _on_first_replica(main_grad, axes):
    """Returns main_grad on the first replica, and zeros on all other replicas.

    main_grad is replicated, so JAX sums its cotangents, the accumulated values, over
    the replicas. The sum must contain the old main_grad only once.
    """
    first = jnp.array(True)
    for axis_name in axes:
        first &= jax.lax.axis_index(axis_name) == 0
    others = jax.lax.stop_gradient(jnp.where(first, 0, main_grad))
    # Equals jnp.where(first, main_grad, 0), but its derivative is the identity on every
    # replica: jnp.where would discard the cotangents of all replicas except the first.
    return main_grad - others
