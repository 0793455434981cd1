"""Dropout on ranks that have elements of their own."""

from collections.abc import Iterable

import jax
from flax import nnx
from jax import lax


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The manual axes whose ranks may have other elements of an array.

    Under `jax.shard_map(check_vma=False)` types do not say it, and all axes count.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if any(_varying(lax.axis_index(axis_name)) for axis_name in manual):
        return _varying(array)
    return frozenset(manual)


def _varying(array):
    return jax.typeof(array).manual_axis_type.varying


def per_device_key(key: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Makes a key that differs between the ranks of `axes`, of one they share."""
    for axis_name in sorted(axes):
        key = jax.random.fold_in(key, lax.axis_index(axis_name))
    return key


def drop(
    y: jax.Array, rate: float, key: jax.Array, same_axes: Iterable[str] = ()
) -> jax.Array:
    """Drops elements, and others where ranks have other elements.

    Args:
        y: the array.
        rate: the share of elements that is dropped.
        key: the same on every rank.
        same_axes: manual axes whose ranks have the same elements, whatever y's type
            says.
    """
    key = per_device_key(key, varying_axes(y).difference(same_axes))
    # That of linen cannot drop elements of an array on an explicit mesh.
    return nnx.Dropout(rate, deterministic=False)(y, rngs=nnx.Rngs(dropout=key))
