"""Dropout of sharded arrays, with masks that differ between the ranks."""

from collections.abc import Iterable

import jax
from flax import nnx
from jax import lax


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the manual mesh axes along which ranks may hold different data.

    These are the varying axes in the array's type. Under `check_vma=False` the type of
    an array does not contain them, so all manual axes are returned.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if any(_varying(lax.axis_index(axis_name)) for axis_name in manual):
        return _varying(array)
    return frozenset(manual)


def _varying(array):
    return jax.typeof(array).manual_axis_type.varying


def per_device_key(key: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Derives a PRNG key that differs between the ranks of `axes` from a shared key."""
    for axis_name in sorted(axes):
        key = jax.random.fold_in(key, lax.axis_index(axis_name))
    return key


def drop(
    y: jax.Array, rate: float, key: jax.Array, same_axes: Iterable[str] = ()
) -> jax.Array:
    """Applies dropout to a sharded array, with a separate mask for each shard.

    Args:
        y: the array.
        rate: the probability of dropping an element.
        key: PRNG key, the same on every rank.
        same_axes: manual axes whose ranks have the same elements, even if the type of
            `y` varies over them.
    """
    key = per_device_key(key, varying_axes(y).difference(same_axes))
    # nnx.Dropout, because linen's Dropout does not support arrays on an explicit mesh.
    return nnx.Dropout(rate, deterministic=False)(y, rngs=nnx.Rngs(dropout=key))
