"""Over which mesh axes a value varies, as `jax.shard_map(check_vma=True)` types it.

With `check_vma=False` no value has such a type, and everything here does nothing.
"""

from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.sharding import ManualAxisType, PartitionSpec

Axes = frozenset[str]


def axes_of(*values) -> Axes:
    """The mesh axes over which at least one of the arrays or avals varies."""
    types = (value if _is_aval(value) else jax.typeof(value) for value in values)
    return frozenset().union(*(aval.manual_axis_type.varying for aval in types))


def is_tracked(axis_name: tuple[str, ...]) -> bool:
    """Whether the surrounding `shard_map` types values by the axes they vary over."""
    return bool(axis_name) and bool(axes_of(lax.axis_index(axis_name[0])))


def promote(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Casts `value` to vary over `axes` too; its transpose sums over the new ones."""
    new = frozenset(axes) - axes_of(value)
    return lax.pcast(value, tuple(sorted(new)), to="varying") if new else value


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
