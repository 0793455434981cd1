"""Gradients summed over microbatches in place, computed per device of the mesh."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from lm.model import Kernel, LanguageModel

AXES = ("dp", "tp")


def accumulate(
    loss_fn: Callable[..., jax.Array],
    graph: nnx.GraphDef,
    params: nnx.State,
    batch: tuple[jax.Array, ...],
    dtype: jnp.dtype,
) -> tuple[nnx.State, jax.Array]:
    """Sums a loss and its gradients over microbatches on this device.

    The wgrad GEMM adds a kernel's gradient to its main_grad, in the buffer that the
    scan carries. XLA adds the other, smaller gradients.

    Args:
        loss_fn: called with the model and one microbatch; returns a sum over tokens.
        graph: graph definition of the model.
        params: this device's parameter shards in f32.
        batch: arrays of shape [microbatches, ...].
        dtype: dtype that kernels are cast to for the GEMMs.

    Returns:
        This device's contributions to the gradients, f32 like `params`, and to the
        loss.
    """
    kernels, others = _promoted(params)
    rounded = jax.tree.map(lambda kernel: kernel.astype(dtype), kernels)

    def add_microbatch(sums, microbatch):
        def loss_of(main_grads, others):
            return loss_fn(_merge(graph, rounded, main_grads, others), *microbatch)

        main_grads, other_grads = sums
        loss_and_gradients = jax.value_and_grad(loss_of, argnums=(0, 1))
        loss, (main_grads, new) = loss_and_gradients(main_grads, others)
        return (main_grads, jax.tree.map(jnp.add, other_grads, new)), loss

    zeros = jax.tree.map(jnp.zeros_like, (kernels, others))
    (main_grads, other_grads), losses = lax.scan(add_microbatch, zeros, batch)
    return nnx.merge_state(main_grads, other_grads), losses.sum()


def assemble(graph: nnx.GraphDef, params: nnx.State, dtype: jnp.dtype) -> LanguageModel:
    """Builds the model for calls without gradients."""
    kernels, others = _promoted(params)
    rounded = jax.tree.map(lambda kernel: kernel.astype(dtype), kernels)
    # main_grads are only used in gradients, so any arrays of the same shapes work.
    return _merge(graph, rounded, kernels, others)


def mean(gradients: nnx.State, specs: nnx.State, num_tokens: int) -> nnx.State:
    """Sums gradients over the devices and divides them by the number of tokens."""

    def of_parameter(share: jax.Array, spec: PartitionSpec) -> jax.Array:
        replicated_over = tuple(axis for axis in AXES if axis not in spec)
        return lax.psum(share, replicated_over) / num_tokens

    return jax.tree.map(of_parameter, gradients, specs)


def _promoted(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    # Splits kernels from other parameters. Both are cast to vary over all mesh axes:
    # otherwise JAX would sum gradients over devices for each microbatch, not in `mean`.
    kernels, others = nnx.split_state(params, Kernel, ...)
    kernels = lax.pcast(kernels, "dp", to="varying")
    return kernels, lax.pcast(others, AXES, to="varying")


def _merge(graph, kernels, main_grads, others) -> LanguageModel:
    pairs = jax.tree.map(lambda kernel, grad: (kernel, grad), kernels, main_grads)
    return nnx.merge(graph, pairs, others)
