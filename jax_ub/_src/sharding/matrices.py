"""Reshapes activations and kernels of several dimensions to matrices, and back."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_ub._src.scaled_array import ScaledArray, is_scaled


def merge_features(x: jax.Array, num_dims: int) -> jax.Array:
    """Merges the last `num_dims` dimensions of an array into one."""
    lead = x.ndim - num_dims
    return jax.lax.collapse(_sharded_only_along(x, range(lead + 1)), lead)


def _sharded_only_along(array, dims):
    """Replicates an explicitly sharded array along all dimensions except `dims`.

    A JAX reshape cannot merge dimensions of which a later one is sharded.
    """
    sharding = jax.typeof(array).sharding
    spec = [entry if dim in dims else None for dim, entry in enumerate(sharding.spec)]
    if spec == list(sharding.spec):
        return array
    return jax.sharding.reshard(array, sharding.update(spec=P(*spec)))


def as_matrix(kernel: Any, num_in: int) -> Any:
    """Reshapes a kernel `[*in, *out]`, with `num_in` input dimensions, to a matrix.

    If it is FP8, a scale per tensor becomes a scalar, and other scales a matrix.
    """
    if is_scaled(kernel):
        values = as_matrix(kernel.values, num_in)
        source = None if kernel.source is None else as_matrix(kernel.source, num_in)
        if kernel.scaling == "tensor":
            return ScaledArray(values, kernel.scales.reshape(()), source)
        return ScaledArray(values, as_matrix(kernel.scales, num_in), source)
    kernel = _sharded_only_along(kernel, (0, num_in))
    # With explicit axes, one JAX reshape cannot merge both the input and the output
    # dimensions.
    return jax.lax.collapse(jax.lax.collapse(kernel, 0, num_in), 1)


def split_features(y: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Reshapes y [..., N] to [..., *sizes]. The first new axis is sharded like N."""
    shape, sharding = (*y.shape[:-1], *sizes), jax.typeof(y).sharding
    if not sharding.mesh.explicit_axes:
        return y.reshape(shape)
    # The sharding is given, because JAX would shard another new dimension if the first
    # new dimension had size 1.
    spec = P(*sharding.spec, *[None] * (len(sizes) - 1))
    return jax.lax.reshape(y, shape, out_sharding=sharding.update(spec=spec))
