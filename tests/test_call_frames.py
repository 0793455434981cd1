"""The number of stack frames from a layer to its primitive is limited."""

import traceback

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs import tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.primitives import lowering
from jax_ub.flax import Linear


@pytest.fixture
def frames(monkeypatch):
    """Returns the frames of jax_ub when a primitive is traced, for each call."""
    found = []

    def check_capacity(call, operands):
        names = (f"{f.filename}:{f.name}" for f in traceback.extract_stack())
        found.append([name for name in names if "/jax_ub/_src/" in name])

    monkeypatch.setattr(lowering, "check_capacity", check_capacity)
    return found


@pytest.mark.parametrize("parallel", ["column", "row", None])
def test_a_flax_layer_has_at_most_eight(frames, parallel):
    with jax.set_mesh(tp_mesh(4)):
        layer = Linear(16, 16, parallel=parallel, rngs=nnx.Rngs(0))
        jax.eval_shape(layer, jnp.ones((8, 16)))
    assert frames
    assert all(len(names) <= 8 for names in frames), frames


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_a_fusible_operation_has_at_most_eight(frames, parallel):
    op = ops.BasicLinear(
        16,
        16,
        tensor_parallel_mode=parallel,
        sequence_parallel=True,
        userbuffers_options={"comm_name": "qkv"},
    )
    model = ops.Sequential(op)
    params = model.init(jax.random.key(0))
    tokens, features = P("tp"), P(None, "tp")
    x, y = (tokens, features) if parallel == "column" else (features, tokens)
    run = jax.shard_map(
        model, mesh=tp_mesh(4), in_specs=(model.specs(), x), out_specs=y
    )
    jax.eval_shape(run, params, jnp.ones((8, 16)))
    assert frames
    assert all(len(names) <= 8 for names in frames), frames


def test_a_function_has_at_most_six(frames):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    specs = (P("tp"), P(None, "tp"))
    run = jax.shard_map(
        function, mesh=tp_mesh(4), in_specs=specs, out_specs=P(None, "tp")
    )
    jax.eval_shape(run, jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert frames
    assert all(len(names) <= 6 for names in frames), frames
