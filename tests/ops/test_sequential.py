"""A list of operations, called one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

from jax_ub import ops


def block():
    """A residual MLP block of every kind of operation."""
    residual = ops.MakeExtraOutput(in_place=True)
    return ops.Sequential(
        residual.with_extra_output_channel(0, "residual", output_to_caller=False),
        ops.LayerNorm(8),
        ops.Linear(8, 16, tensor_parallel_mode="column", sequence_parallel=True),
        ops.GELU(),
        ops.Linear(16, 8, tensor_parallel_mode="row", sequence_parallel=True),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(in_place=True).with_extra_input_channel(0, "residual"),
    )


def plain_block(params, x):
    _, norm, up, _, down, _, _ = params
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    normalized = (x - mean) / jnp.sqrt(variance + 1e-5)
    y = normalized * norm["scale"] + norm["bias"]
    y = jax.nn.gelu(y @ up["kernel"] + up["bias"])
    return x + 0.5 * (y @ down["kernel"] + down["bias"])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_block_and_its_gradients_are_those_of_plain_jax(num_ranks, check_vma):
    seq = block()
    params = jax.tree.map(lambda p: p + 0.25, seq.init(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (3, 8, 8))
    specs = (seq.specs(), P(None, "tp"))
    run = on_ranks(seq, tp_mesh(num_ranks), specs, P(None, "tp"), check_vma=check_vma)

    def step(function):
        loss = lambda *v: jnp.sum(jnp.sin(function(*v)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    np.testing.assert_allclose(run(params, x), plain_block(params, x), atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5),
        step(run),
        step(plain_block),
    )
