"""Kernels that lie on data axes, too: gathered for each use, their gradients scattered.

What differs from `jax.lax.all_gather` of everything: a `main_grad` stays where it lies.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ub.primitives import varying


def remat_gathers(function: Callable, axes: tuple[str, ...]) -> Callable:
    """Lets the backward of a function gather what it gathers over mesh axes anew.

    The forward would keep it for that: the whole kernels of all layers of a scan.
    """

    def keep(primitive, *_, **params):
        return primitive is not lax.all_gather_p or params["axis_name"] != axes

    return jax.checkpoint(function, policy=keep)


def gather_kernels(
    x: jax.Array, kernels: Any, main_grads: Any, *, axes: tuple[str, ...], dim: int
) -> tuple[Any, Any]:
    """Gathers kernels over mesh axes whose ranks multiply other rows by them.

    Args:
        x: what they are multiplied with.
        kernels: the rank's parts of a kernel, or of several.
        main_grads: those of their accumulators, or None.
        axes: the mesh axes.
        dim: the dimension that is sharded over them.

    Returns:
        The whole kernels, and accumulators of their shapes: `pad_with_zeros`.
    """

    def gather(kernel):
        # Further replicas sum their gradients behind the scatter, so parts of them.
        kernel = varying.promote(kernel, varying.axes_of(x))
        return lax.all_gather(kernel, axes, axis=dim, tiled=True)

    def spread(main_grad):
        return pad_with_zeros(main_grad, axes, dim)

    return jax.tree.map(gather, kernels), jax.tree.map(spread, main_grads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def pad_with_zeros(main_grad: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The rank's part of a main_grad in its place, and zeros where its peers' are.

    Every rank adds its own gradient, all are summed, and each takes its part: so that
    sum has every part of main_grad once.

    Args:
        main_grad: the rank's part.
        axes: the mesh axes that it is sharded over.
        dim: the dimension that is.
    """
    shape = list(main_grad.shape)
    start = lax.axis_index(axes) * shape[dim]
    shape[dim] *= lax.axis_size(axes)
    zeros = jnp.zeros(shape, main_grad.dtype)
    zeros = varying.promote(zeros, varying.axes_of(main_grad))
    return lax.dynamic_update_slice_in_dim(zeros, main_grad, start, dim)


def _forward(main_grad, axes, dim):
    return pad_with_zeros(main_grad, axes, dim), None


def _backward(axes, dim, _, accumulated):
    return (lax.psum_scatter(accumulated, axes, scatter_dimension=dim, tiled=True),)


pad_with_zeros.defvjp(_forward, _backward)
