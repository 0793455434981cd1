"""Batching rules for `jax.vmap`: one call with another batch axis, or a loop."""

import jax
import jax.numpy as jnp
from jax import lax


def fold(operands, dims):
    """Moves each operand's `jax.vmap` axis to the front, as a leading batch axis.

    Operands that are not mapped are broadcast along it.
    """
    size = mapped_size(operands, dims)
    return [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if dim is None
        else jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
    ]


def loop(function, operands, dims):
    """Implements `jax.vmap` by one call of `function` for each index, in order."""
    mapped = [
        jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
        if dim is not None
    ]

    def one(slices):
        slices = iter(slices)
        return function(
            *(
                operand if dim is None else next(slices)
                for operand, dim in zip(operands, dims, strict=True)
            )
        )

    return lax.map(one, mapped)


def mapped_size(operands: list[jax.Array], dims: list[int | None]) -> int:
    """Returns the size of the axis that `jax.vmap` maps."""
    return next(
        operand.shape[dim]
        for operand, dim in zip(operands, dims, strict=True)
        if dim is not None
    )
