"""A transformer block's MLP, trained fused and unfused from the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import tp_mesh
from sequences import linear, names

from jax_ub import ops

pytestmark = pytest.mark.slow

WIDTH, STEPS = 24, 10
TOKENS = P(None, "tp")


def block(in_place, method=None):
    """Returns a pre-norm MLP with a residual, to which every fusion applies."""
    skip = ops.MakeExtraOutput(in_place=in_place)
    return ops.Sequential(
        skip.with_extra_output_channel(0, "skip", False),
        ops.RMSNorm(WIDTH),
        linear("column", WIDTH, 4 * WIDTH, "fc1", method=method),
        ops.GELU(),
        linear("row", 4 * WIDTH, WIDTH, "fc2", method=method),
        ops.AddExtraInput(in_place=True).with_extra_input_channel(0, "skip"),
    )


def trained(seq, num_ranks, dtype):
    """Returns the losses of ten steps of gradient descent with momentum."""
    layer = jax.shard_map(
        lambda params, x: seq(params, x),
        mesh=tp_mesh(num_ranks),
        in_specs=(seq.specs(), TOKENS),
        out_specs=TOKENS,
    )
    x = normal(0, (2, 8 * num_ranks, WIDTH), dtype)
    target = normal(1, x.shape)

    def loss(params):
        difference = layer(params, x).astype("float32") - target
        return jnp.mean(difference**2)

    @jax.jit
    def step(params, momentum):
        value, grads = jax.value_and_grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.3 * m, params, momentum)
        return params, momentum, value

    params = seq.init(jax.random.key(0))
    momentum, losses = jax.tree.map(jnp.zeros_like, params), []
    for _ in range(STEPS):
        params, momentum, value = step(params, momentum)
        losses.append(float(value))
    return np.array(losses)


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "method", "in_place"),
    [
        (2, "float32", None, False),
        (4, "float32", "ring_exchange", True),
        (3, "bfloat16", "pipeline", False),
    ],
)
def test_fused_and_unfused_losses_are_equal(num_ranks, dtype, method, in_place):
    seq = block(in_place, method)
    fuser = ops.OperationFuser([seq])
    assert names(fuser.forward_ops) == [
        "MakeExtraOutput",
        "RMSNorm",
        "UserbuffersForwardLinear",
        "GELU",
        "ForwardLinearBiasAdd",
    ]
    assert names(fuser.backward_ops).count("UserbuffersBackwardLinear") == 2
    found = trained(seq, num_ranks, dtype)
    with ops.without_fusions():
        expected = trained(seq, num_ranks, dtype)
    # Both round at different places, so they differ by the dtype's precision.
    tolerance = 1e-5 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert found[-1] < 0.7 * found[0]
