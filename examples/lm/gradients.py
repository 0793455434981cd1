"""Gradients summed over microbatches in place, computed per device of the mesh."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jax_ub as ub
from lm.model import Kernel, LanguageModel

AXES = ("dp", "tp")


def accumulate(
    loss_fn: Callable[..., jax.Array],
    graph: nnx.GraphDef,
    params: nnx.State,
    fp8: nnx.State,
    batch: tuple[jax.Array, ...],
    dtype: jnp.dtype,
) -> tuple[nnx.State, nnx.State, jax.Array]:
    """Sums a loss and its gradients over microbatches on this device.

    The wgrad GEMM adds a kernel's gradient to its main_grad, in the buffer that the
    scan carries. XLA adds the other, smaller gradients. The FP8 state is carried, too:
    each microbatch updates it.

    Args:
        loss_fn: called with the model and one microbatch; returns a sum over tokens.
        graph: graph definition of the model.
        params: this device's parameter shards in f32.
        fp8: state of delayed scaling, the same on all devices.
        batch: arrays of shape [microbatches, ...].
        dtype: dtype that kernels are cast to for the GEMMs.

    Returns:
        This device's contributions to the gradients, f32 like `params`; the new FP8
        state; and this device's contribution to the loss.
    """
    kernels, others = _promoted(params)
    rounded = jax.tree.map(lambda kernel: kernel.astype(dtype), kernels)

    def add_microbatch(carry, microbatch):
        def loss_of(main_grads, others, fp8):
            model = _merge(graph, rounded, main_grads, others, fp8)
            return loss_fn(model, *microbatch)

        main_grads, other_grads, fp8 = carry
        loss_and_gradients = jax.value_and_grad(loss_of, argnums=(0, 1, 2))
        loss, (main_grads, new, new_fp8) = loss_and_gradients(main_grads, others, fp8)
        other_grads = jax.tree.map(jnp.add, other_grads, new)
        return (main_grads, other_grads, ub.fp8.apply_updates(fp8, new_fp8)), loss

    zeros = jax.tree.map(jnp.zeros_like, (kernels, others))
    (main_grads, other_grads, fp8), losses = lax.scan(
        add_microbatch, (*zeros, fp8), batch
    )
    return nnx.merge_state(main_grads, other_grads), fp8, losses.sum()


def assemble(
    graph: nnx.GraphDef, params: nnx.State, fp8: nnx.State, dtype: jnp.dtype
) -> LanguageModel:
    """Builds the model for calls without gradients."""
    kernels, others = _promoted(params)
    rounded = jax.tree.map(lambda kernel: kernel.astype(dtype), kernels)
    # main_grads are only used in gradients, so any arrays of the same shapes work.
    return _merge(graph, rounded, kernels, others, fp8)


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


def _merge(graph, kernels, main_grads, others, fp8) -> LanguageModel:
    pairs = jax.tree.map(lambda kernel, grad: (kernel, grad), kernels, main_grads)
    return nnx.merge(graph, pairs, others, fp8)
