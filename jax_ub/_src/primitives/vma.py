"""Reads and changes the mesh axes over which values vary (vma types).

`jax.shard_map(check_vma=True)` tracks these axes. With `check_vma=False` values have no
vma types: no value varies over any axis, and the functions here change nothing.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

Axes = frozenset[str]


def axes_of(*values) -> Axes:
    """Returns the mesh axes over which any of the arrays or avals varies."""
    types = (
        value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value)
        for value in values
    )
    return frozenset().union(*(aval.manual_axis_type.varying for aval in types))


def is_vma_checked(axis_name: tuple[str, ...]) -> bool:
    """Returns whether the surrounding `shard_map` has `check_vma=True`."""
    return bool(axis_name) and bool(axes_of(lax.axis_index(axis_name[0])))


def pcast_varying(tree: Any, axes: Iterable[str]) -> Any:
    """Adds `axes` to the mesh axes over which the arrays of a tree vary.

    The transpose sums over the new axes.
    """
    return jax.tree.map(functools.partial(_pcast_varying, axes=axes), tree)


def _pcast_varying(value, *, axes):
    new = frozenset(axes) - axes_of(value)
    sizes = jax.sharding.get_abstract_mesh().shape
    of_one = tuple(sorted(axis for axis in new if sizes.get(axis) == 1))
    others = tuple(sorted(new.difference(of_one)))
    if of_one:
        value = _vary_p.bind(value, axes=of_one)
    return lax.pcast(value, others, to="varying") if others else value


def is_sharded(tree: Any) -> bool:
    """Returns whether an array of the tree is sharded over explicit mesh axes."""
    return any(any(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(tree))


def unsharded(tree: Any) -> Any:
    """Removes explicit shardings over a mesh of one device from the types of arrays.

    The gradients of a `custom_vjp` must have the types of its operands, and results of
    the primitives have unsharded types.
    """

    def drop(value):
        sharding = jax.typeof(value).sharding
        if sharding.mesh.size != 1 or not any(sharding.spec):
            return value
        return jax.sharding.reshard(value, sharding.update(spec=PartitionSpec()))

    return jax.tree.map(drop, tree)


def with_sharding(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Gives a result the sharding that `unsharded` removed from the operands."""
    if sharding.mesh.size != 1 or not any(sharding.spec):
        return value
    return jax.sharding.reshard(value, sharding)


def with_rows_of(x: jax.core.ShapedArray, y: jax.Array) -> jax.Array:
    """Restores the explicit sharding of the rows of x in the type of a result y."""
    rows = x.sharding.spec[:-1][: y.ndim]
    return with_sharding(y, x.sharding.update(spec=PartitionSpec(*rows)))


def pcast_replicated(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Casts a value that is equal on all ranks of `axes` from varying to replicated."""
    own = tuple(sorted(frozenset(axes) & axes_of(value)))
    return _same_p.bind(value, axes=own) if own else value


def sum_over(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Sums `value` over mesh axes. Axes of one rank need no communication."""
    sizes = jax.sharding.get_abstract_mesh().shape
    others = tuple(axis for axis in axes if sizes.get(axis) != 1)
    of_one = frozenset(axes).difference(others)
    value = lax.psum(value, others) if others else value
    return pcast_replicated(value, of_one) if of_one else value


def _cast(name: str, change: Callable[[Axes, Axes], Axes]) -> Primitive:
    """Makes a primitive that changes only the mesh axes over which its operand varies.

    Args:
        name: the name of the primitive.
        change: maps the value's varying axes and the parameter `axes` to the varying
            axes of the result.
    """
    primitive = Primitive(name)

    def abstract(aval, *, axes):
        varies = change(axes_of(aval), frozenset(axes))
        return aval.update(manual_axis_type=ManualAxisType(varying=varies))

    def batch(values, dims, *, axes):
        return primitive.bind(*values, axes=axes), *dims

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda ctx, value, *, axes: [value])
    return primitive


# `_vary_p` replaces `jax.lax.pcast(to="varying")` for mesh axes of size 1. The
# transpose of `_vary_p` is `_same_p`, which communicates nothing. The transpose of
# JAX's cast is an all-reduce.
_vary_p = _cast("jax_ub_vary", frozenset.union)
_same_p = _cast("jax_ub_same", frozenset.difference)
ad.deflinear2(_vary_p, lambda dy, _, *, axes: [pcast_replicated(dy, axes)])
ad.deflinear2(_same_p, lambda dy, _, *, axes: [pcast_varying(dy, axes)])


def result_aval(shape: Sequence[int], dtype, axes: Axes, like: jax.core.ShapedArray):
    """Returns an aval of this shape and dtype that varies over the mesh axes `axes`.

    The aval is on the mesh of `like`.
    """
    return like.update(
        shape=tuple(shape),
        dtype=dtype,
        weak_type=False,
        sharding=like.sharding.update(spec=PartitionSpec(*(None for _ in shape))),
        manual_axis_type=ManualAxisType(varying=axes),
    )
