"""The number of stack frames from a layer to its primitive is limited."""

import traceback

import jax
import jax.numpy as jnp
import pytest
from covering import covering
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs import tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub._src.primitives import lowering
from jax_ub.flax import Linear


@pytest.fixture
def frames(monkeypatch):
    """Returns the frames of jax_ub where a primitive is bound, for each call."""
    found = []

    def check_capacity(call, operands):
        names = (f"{f.filename}:{f.name}" for f in traceback.extract_stack())
        *own, abstract_eval = (name for name in names if "/jax_ub/_src/" in name)
        assert abstract_eval.endswith("call.py:_abstract_eval")  # JAX calls it
        found.append(own)

    jax.clear_caches()  # a function that was traced before is not traced again
    monkeypatch.setattr(lowering, "check_capacity", check_capacity)
    return found


@pytest.mark.parametrize("parallel", ["column", "row", None])
def test_a_flax_layer_has_at_most_seven(frames, parallel):
    with jax.set_mesh(tp_mesh(4)):
        layer = Linear(16, 16, parallel=parallel, rngs=nnx.Rngs(0))
        jax.eval_shape(layer, jnp.ones((8, 16)))
    assert frames
    assert all(len(names) <= 7 for names in frames), frames


@covering(window=[1, 2, 3], parallel=["column", "row"], name=[None, "qkv"])
def test_fusible_operations_have_at_most_eight(frames, parallel, name, window):
    linear = ops.BasicLinear(
        16,
        16,
        tensor_parallel_mode=parallel,
        sequence_parallel=True,
        userbuffers_options=None if name is None else {"comm_name": name},
    )
    bias = ops.Bias(16, tensor_parallel=parallel == "column")
    model = ops.Sequential(linear, bias, ops.AddExtraInput(in_place=True))[:window]
    params = model.init(jax.random.key(0))
    tokens, features = P("tp"), P(None, "tp")
    x, y = (tokens, features) if parallel == "column" else (features, tokens)
    specs = (model.specs(), x, *[y] * (window == 3))
    run = jax.shard_map(model, mesh=tp_mesh(4), in_specs=specs, out_specs=y)
    extras = [jnp.ones((8, 16))] * (window == 3)
    jax.eval_shape(run, params, jnp.ones((8, 16)), *extras)
    assert frames
    assert all(len(names) <= 8 for names in frames), frames


def test_a_function_has_at_most_five(frames):
    def function(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp")

    specs = (P("tp"), P(None, "tp"))
    run = jax.shard_map(
        function, mesh=tp_mesh(4), in_specs=specs, out_specs=P(None, "tp")
    )
    jax.eval_shape(run, jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert frames
    assert all(len(names) <= 5 for names in frames), frames


@pytest.mark.parametrize("parallel", ["column", "row"])
def test_a_function_of_fp8_operands_has_at_most_eight(frames, parallel):
    def loss(x, w):
        x, w = ub.quantize(x, axis_name="tp"), ub.quantize(w, axis_name="tp")
        y = ub.linear(x, w, parallel=parallel, axis_name="tp")
        return jax.lax.psum(jnp.sum(y), "tp")

    specs = (
        (P("tp"), P(None, "tp")) if parallel == "column" else (P(None, "tp"), P("tp"))
    )
    run = jax.shard_map(loss, mesh=tp_mesh(4), in_specs=specs, out_specs=P())
    jax.eval_shape(jax.grad(run), jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert frames
    assert all(len(names) <= 8 for names in frames), frames
