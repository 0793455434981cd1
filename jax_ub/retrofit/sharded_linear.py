"""A linear layer that lays its arrays out by itself.

Inside the caller's own `jax.shard_map` its arrays are one rank's shards already, and
they are multiplied as they are. On global arrays it makes the `shard_map` itself:

| parallel | x | kernel | bias | y |
|---|---|---|---|---|
| "column" | `[data, tp, -]` | `[-, tp]` | `[tp]` | `[data, -, tp]` |
| "row" | `[data, -, tp]` | `[tp, -]` | `[-]` | `[data, tp, -]` |
| None | `[data, tp, -]` | `[-, -]` | `[-]` | `[data, tp, -]` |

`data` stands for the data axes, and is left out where they do not divide the leading
axis. Without sequence parallelism no token axis is sharded over `tp`; a layer that is
not parallel leaves tokens whole where `tp` does not divide them, too. Where x is
`[tokens, features]`, its tokens lie over `(data..., tp)`.

A kernel's other dimension may lie on data axes, too (FSDP): the rank's part is gathered
inside the `shard_map`, so that its gradient is scattered there.
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

from jax_ub import methods
from jax_ub.errors import (
    ShapeContractError,
    UnknownNameError,
    UnsupportedOverlapError,
    nearest,
    shown,
)
from jax_ub.retrofit.sharding_layout import AnyMesh, ShardingLayout
from jax_ub.rules import main_grads
from jax_ub.rules.all_gather_matmul import all_gather_matmul
from jax_ub.rules.fsdp import gather_kernels, remat_gathers
from jax_ub.rules.linear import linear_without_gather
from jax_ub.rules.matmul_all_reduce import matmul_all_reduce
from jax_ub.rules.matmul_reduce_scatter import matmul_reduce_scatter
from jax_ub.runtime import overlaps
from jax_ub.shapes import has_symbolic_sizes


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
    """Multiplies x [..., K] by kernel [K, N] in the layout of `sharding_layout`.

    Args:
        sharding_layout: the layout.
        x: activations, `[..., tokens, K]`; a vector `[K]` counts as one token.
        kernel: `[K, N]`, or `[N, K]` if `sharding_layout.rhs_transposed`; global, or
            the rank's shard where the axis is manual. A tuple of kernels shares what is
            gathered of x, in one call.
        bias: `[N]` or None, laid out as `sharding_layout.bias_spec`; a tuple where
            `kernel` is one.
        main_grad: f32 `[K, N]` or None, laid out as the kernel; a tuple where `kernel`
            is one.
        residual: `[..., tokens, N]` or None, added to the result of a row layer before
            it is rounded.
        out_dtype: dtype of the result; None is that of `x`.

    Returns:
        `[..., tokens, N]`, a tuple of them where `kernel` is one.

    Raises:
        ShapeContractError: if no mesh is known, or the arrays do not divide into its
            ranks or do not fit each other.
        UnknownNameError: if the mesh lacks an axis.
        UnsupportedOverlapError: if the sizes of x are symbolic, and the mesh is
            explicit or a method was named.
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
        # The ops take nothing empty; with an accumulator, which a constant would lose,
        # they say so.
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
        # As the op does, which cannot know an accumulator through a shard_map.
        prepare = functools.partial(main_grads.prepare, sharding_layout.op, axes=())
        main_grad = jax.tree.map(prepare, main_grad, kernel)
    operands = (x, kernel, bias, main_grad, residual)
    repeated = _record_repeated(asked, sharding_layout, mesh, x.shape)
    # The layer looks up its name and its method while it is traced.
    configuration = overlaps.configuration()
    return _on_mesh(
        configuration, sharding_layout, mesh, out_dtype, repeated, *operands
    )


def with_output_sharding(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Moves the result to where its caller asks for it; None leaves it where it is."""
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
    """Makes a matrix of a kernel `[*in, *out]`, which has `num_in` in dimensions."""
    if kernel.ndim == 2:
        return kernel
    ins, outs = kernel.shape[:num_in], kernel.shape[num_in:]
    # In two steps: over explicit axes jax merges dimensions in one place at a time.
    return kernel.reshape(math.prod(ins), *outs).reshape(
        math.prod(ins), math.prod(outs)
    )


def split_features(y: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Makes several dimensions of the last one, of which the first lies as that did."""
    shape, sharding = (*y.shape[:-1], *sizes), jax.typeof(y).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return y.reshape(shape)
    # Of a first one of size 1, jax would shard another.
    spec = P(*sharding.spec, *[None] * (len(sizes) - 1))
    return jax.lax.reshape(y, shape, out_sharding=spec)


def _leave_whole(sharding_layout, mesh, x_shape):
    """Leaves tokens whole where a layer that is not parallel cannot have them split."""
    if sharding_layout.parallel is not None:
        return sharding_layout
    splits = set(sharding_layout.axes) <= set(mesh.shape)
    if splits and indivisible_reason(sharding_layout, mesh, x_shape) is None:
        return sharding_layout
    return dataclasses.replace(sharding_layout, sequence_parallel=False)


def indivisible_reason(
    sharding_layout: ShardingLayout, mesh: AnyMesh, x_shape: Sequence[int]
) -> str | None:
    """Returns why x [..., tokens, K] does not divide over the mesh; None if it does."""
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
    """Records which ranks compute the same rows of x [..., tokens, K], if any do.

    Args:
        asked: the sharding_layout that was asked for.
        sharding_layout: the sharding_layout that is used.
        mesh: the mesh.
        x_shape: the shape of x.

    Returns:
        The reason, None if there are no such ranks.
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
    methods.record_fallback(sharding_layout.op, reason)
    return reason


def _sizes(mesh, names):
    return {name: mesh.shape[name] for name in names}


def _on_no_mesh(sharding_layout, mesh, out_dtype, x, *operands):
    """Leaves an exported program of any size to XLA, which lays it out."""
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
    with methods.falling_back(sharding_layout.op, reason):
        return _multiply(sharding_layout.whole(), out_dtype, x, *operands)


# One program where nothing around the layer is compiled. Not inlined: outside jax.jit
# jax 0.10.2 takes scans and what is rematerialized apart, and runs what it finds there.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _on_mesh(configuration, sharding_layout, mesh, out_dtype, repeated, *operands):
    """Runs the layer in a `shard_map` over every axis that is not manual yet."""
    x = operands[0]
    shown = batch_axes(sharding_layout, mesh, x)
    data_axes = nontrivial_axes(mesh, shown)
    x_spec, y_spec = _activation_specs(sharding_layout, data_axes, x.ndim)
    # Ranks that hold the same tokens may leave it to XLA to gather their kernels.
    fsdp_axes = tuple(
        name for name in sharding_layout.fsdp_axes if mesh.shape[name] > 1
    )
    if not set(fsdp_axes) <= set(data_axes):
        fsdp_axes = ()
    sharding_layout = dataclasses.replace(sharding_layout, fsdp_axes=fsdp_axes)
    kernel_spec = sharding_layout.kernel_spec
    specs = (x_spec, kernel_spec, sharding_layout.bias_spec, kernel_spec, y_spec)
    _, out_spec = _activation_specs(sharding_layout, shown, x.ndim)
    # The axes whose ranks hold other tokens for the same part of the kernel.
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
    with methods.replicating(sharding_layout.op, repeated):
        return shard_map_operands(local, mesh, specs, out_spec, *operands)


def shard_map_operands(
    local: Callable, mesh: AnyMesh, in_specs: tuple, out_specs: Any, *operands: Any
) -> Any:
    """Calls `local` in a `shard_map` over every axis that is not manual yet.

    Args:
        local: what one rank computes.
        mesh: the mesh; with manual axes it is that of the `shard_map` around the call.
        in_specs: the layout of each operand, that of all arrays in it.
        out_specs: the layout of the result.
        *operands: they are moved into their layouts.
    """
    context = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        local,
        mesh=None if mesh == context else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(context.manual_axes),
    )(*map(functools.partial(_place, mesh), operands, in_specs))


# The functions that communicate forward.
_FUSED: dict[tuple[str | None, bool], Callable] = {
    ("column", True): all_gather_matmul,
    ("row", True): matmul_reduce_scatter,
    ("row", False): matmul_all_reduce,
}


def _multiply(sharding_layout, out_dtype, x, kernel, bias, main_grad, residual):
    """Runs the layer on this rank's shards."""
    parallel, sequence_parallel = (
        sharding_layout.parallel,
        sharding_layout.sequence_parallel,
    )
    options = {
        "axis_name": None if parallel is None else sharding_layout.axis_name,
        "method": sharding_layout.flagged_method,
        "ub_name": sharding_layout.ub_name,
        "rhs_transposed": sharding_layout.rhs_transposed,
    }
    if residual is not None:
        options["residual"] = residual
    fused = _FUSED.get((parallel, sequence_parallel), linear_without_gather)

    def multiply(w, bias, main_grad):
        given = {"main_grad": main_grad, "out_dtype": out_dtype, **options}
        return fused(x, w, bias=bias, **given)

    if isinstance(kernel, tuple) and fused is not all_gather_matmul:
        none = (None,) * len(kernel)  # nothing is gathered that they could share
        return tuple(map(multiply, kernel, bias or none, main_grad or none))
    return multiply(kernel, bias, main_grad)


def nontrivial_axes(mesh: AnyMesh, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of more than one rank: the others move nothing."""
    return tuple(name for name in names if mesh.shape[name] > 1)


def batch_axes(
    sharding_layout: ShardingLayout, mesh: AnyMesh, x: jax.Array
) -> tuple[str, ...]:
    """Returns the axes that shard the leading axis of x and of the result.

    Types of an explicit mesh name those of one rank, too, and in an order. So these are
    as x has them, where it lies on the same ranks already.
    """
    axes = _data_axes(sharding_layout, mesh, x.shape)
    entry = jax.typeof(x).sharding.spec[0]
    names = entry if isinstance(entry, tuple) else (entry,)
    others = {*mesh.shape} - {*sharding_layout.axes}
    own = tuple(name for name in names if name in others)
    lies_so = {*nontrivial_axes(mesh, own)} == {*nontrivial_axes(mesh, axes)}
    return own if own and lies_so and sharding_layout.data_axes is None else axes


def _data_axes(sharding_layout, mesh, x_shape):
    """Returns those for a shape alone, explicit axes of one rank among them."""
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
    # The tokens of [tokens, features] are shared with the tensor-parallel ranks.
    shares = len(x_shape) == 2 and sharding_layout.sequence_parallel
    num_tp = sharding_layout.axis_size(mesh) if shares else 1
    num_data = math.prod(mesh.shape[name] for name in axes)
    return axes if x_shape[0] % (num_data * num_tp) == 0 else ()


def _activation_specs(sharding_layout, data_axes, ndim):
    """Returns the layouts of x and y, both [..., tokens, features]."""
    lead = [data_axes or None, *[None] * (ndim - 3)] if ndim > 2 else []
    tokens = data_axes if ndim == 2 else ()
    shared = (
        (*tokens, *sharding_layout.axes)
        if sharding_layout.sequence_parallel
        else tokens
    )
    by_feature = P(*lead, tokens or None, sharding_layout.axis_name)
    by_token = P(*lead, shared or None, None)
    if sharding_layout.parallel == "column":
        return by_token, by_feature
    if sharding_layout.parallel == "row":
        return by_feature, by_token
    return by_token, by_token


def _place(mesh, operand, spec):
    """Moves the arrays of `operand` into `spec` where their mesh axes are explicit.

    `shard_map` moves its operands by itself over automatic axes, and refuses operands
    that lie otherwise over explicit ones.
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
    """Leaves `main_grad` with the first replica and zeros with the others.

    Every replica accumulates into its own, and the replicas' results are summed, since
    main_grad went in replicated: it must be in that sum once.
    """
    first = jnp.array(True)
    for axis_name in axes:
        first &= jax.lax.axis_index(axis_name) == 0
    others = jax.lax.stop_gradient(jnp.where(first, 0, main_grad))
    # A difference, not a choice, so that every replica's cotangent gets through.
    return main_grad - others
