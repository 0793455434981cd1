"""FSDP: all-gathers kernels before each use and reduce-scatters their gradients.

Unlike kernels, a `main_grad` is never gathered. It stays sharded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub._src.primitives import vma


def remat_gathers(function: Callable, axes: tuple[str, ...]) -> Callable:
    """Wraps a function so that its backward pass repeats all-gathers, to save memory.

    Otherwise the forward pass would save their results: in a scan over layers, the
    whole kernels of all layers.

    Args:
        function: the function to differentiate.
        axes: the mesh axes, as the function's all-gathers name them.
    """

    def keep(primitive, *_, **params):
        return primitive is not lax.all_gather_p or params["axis_name"] != axes

    return jax.checkpoint(function, policy=keep)


def gather_kernels(
    x: jax.Array, kernels: Any, main_grads: Any, *, axes: tuple[str, ...], dim: int
) -> tuple[Any, Any]:
    """All-gathers FSDP-sharded kernels. The backward pass reduce-scatters gradients.

    Args:
        x: the activations that are multiplied by the kernels.
        kernels: this rank's shard of the kernel, or a tree of such shards.
        main_grads: this rank's shards of their accumulators, or None.
        axes: the FSDP mesh axes.
        dim: the kernel dimension that is sharded over `axes`.

    Returns:
        The whole kernels, and accumulators of the same shapes, from `pad_with_zeros`.
    """

    def gather(kernel):
        # Casts the shard to varying before the gather. JAX's backward pass then
        # reduce-scatters the kernel's gradient first, so that it sums only shards, not
        # whole gradients, over other replicas.
        kernel = vma.pcast_varying(kernel, vma.axes_of(x))
        return lax.all_gather(kernel, axes, axis=dim, tiled=True)

    spread = functools.partial(pad_with_zeros, axes=axes, dim=dim)
    return jax.tree.map(gather, kernels), jax.tree.map(spread, main_grads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def pad_with_zeros(main_grad: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Pads a rank's shard of a gradient accumulator with zeros to the kernel's shape.

    The zeros are in the places of the peers' shards. Each rank adds its gradient to the
    padded array, and the backward pass reduce-scatters the results, so every shard of
    the main_grad is counted once.

    Args:
        main_grad: this rank's shard.
        axes: the mesh axes that the main_grad is sharded over.
        dim: the dimension that is sharded.
    """
    shape = list(main_grad.shape)
    start = lax.axis_index(axes) * shape[dim]
    shape[dim] *= lax.axis_size(axes)
    zeros = jnp.zeros(shape, main_grad.dtype)
    zeros = vma.pcast_varying(zeros, vma.axes_of(main_grad))
    return lax.dynamic_update_slice_in_dim(zeros, main_grad, start, dim)


def _forward(main_grad, axes, dim):
    return pad_with_zeros(main_grad, axes, dim), None


def _backward(axes, dim, _, accumulated):
    return (lax.psum_scatter(accumulated, axes, scatter_dimension=dim, tiled=True),)


pad_with_zeros.defvjp(_forward, _backward)
