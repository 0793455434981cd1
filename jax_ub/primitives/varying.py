"""Over which mesh axes a value varies, as `jax.shard_map(check_vma=True)` types it.

With `check_vma=False` no value has such a type, and everything here does nothing.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec

Axes = frozenset[str]


def axes_of(*values) -> Axes:
    """The mesh axes over which at least one of the arrays or avals varies."""
    types = (value if _is_aval(value) else jax.typeof(value) for value in values)
    return frozenset().union(*(aval.manual_axis_type.varying for aval in types))


def is_vma_checked(axis_name: tuple[str, ...]) -> bool:
    """Whether the surrounding `shard_map` types values by the axes they vary over."""
    return bool(axis_name) and bool(axes_of(lax.axis_index(axis_name[0])))


def promote(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Casts `value` to vary over `axes` too; its transpose sums over the new ones."""
    new = frozenset(axes) - axes_of(value)
    sizes = jax.sharding.get_abstract_mesh().shape
    of_one = tuple(sorted(axis for axis in new if sizes.get(axis) == 1))
    others = tuple(sorted(new.difference(of_one)))
    if of_one:
        value = _vary_p.bind(value, axes=of_one)
    return lax.pcast(value, others, to="varying") if others else value


def same_on(axes: Iterable[str], value: jax.Array) -> jax.Array:
    """Types `value` as not varying over axes that have one rank each."""
    own = tuple(sorted(frozenset(axes) & axes_of(value)))
    return _same_p.bind(value, axes=own) if own else value


def sum_over(axes: Iterable[str], value: jax.Array) -> jax.Array:
    """Sums `value` over mesh axes; over axes of one rank nothing is communicated."""
    sizes = jax.sharding.get_abstract_mesh().shape
    others = tuple(axis for axis in axes if sizes.get(axis) != 1)
    of_one = frozenset(axes).difference(others)
    value = lax.psum(value, others) if others else value
    return same_on(of_one, value) if of_one else value


def _cast(name: str, change: Callable[[Axes, Axes], Axes]) -> Primitive:
    """Makes the identity that changes over which axes of one rank a value varies."""
    primitive = Primitive(name)

    @functools.partial(jax.jit, static_argnames="axes")
    def run(value, *, axes):
        return primitive.bind(value, axes=axes)

    def abstract(aval, *, axes):
        varies = change(axes_of(aval), frozenset(axes))
        return aval.update(manual_axis_type=ManualAxisType(varying=varies))

    def batch(values, dims, *, axes):
        return primitive.bind(*values, axes=axes), *dims

    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda ctx, value, *, axes: [value])
    return primitive


# jax.lax.pcast and its transpose, without an all-reduce of one rank.
_vary_p = _cast("jax_ub_vary", frozenset.union)
_same_p = _cast("jax_ub_same", frozenset.difference)
ad.deflinear2(_vary_p, lambda dy, _, *, axes: [same_on(axes, dy)])
ad.deflinear2(_same_p, lambda dy, _, *, axes: [promote(dy, axes)])


def result_aval(shape: Sequence[int], dtype, axes: Axes, like):
    """The aval of a result that varies over `axes`, on the mesh of the aval `like`."""
    return like.update(
        shape=tuple(shape),
        dtype=dtype,
        weak_type=False,
        sharding=like.sharding.update(spec=PartitionSpec(*(None for _ in shape))),
        manual_axis_type=ManualAxisType(varying=axes),
    )


def _is_aval(value):
    return isinstance(value, jax.core.ShapedArray)
