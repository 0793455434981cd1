"""Remat policies by the checkpoint names of calls, as compiled programs show them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_models import assert_trees_close, mesh_of
from jax.sharding import PartitionSpec as P
from operands import normal
from programs import calls, on_ranks, tp_mesh
from sequences import linear

import jax_ub as ub
from jax_ub import ops
from jax_ub.flax import TransformerLayer

pytestmark = pytest.mark.slow

X = (2, 8, 16)
only = jax.checkpoint_policies.save_only_these_names
AG, RS = "all_gather_matmul", "matmul_reduce_scatter"

# AG+GEMM and GEMM+RS calls of a forward and a backward pass with remat: four each, and
# one more for each recomputed call. The result of fc2 is never recomputed.
POLICIES = {
    "all": (only("jax_ub.y"), 4, 4),
    "none": (only(), 6, 5),
    "qkv and proj, not fc1": (only("jax_ub.qkv.y", "jax_ub.proj.y"), 5, 4),
    "fc1, not qkv": (only("jax_ub.fc1.y"), 5, 5),
    "by both names": (only("jax_ub.y", "jax_ub.qkv.y", "jax_ub.fc1.y"), 4, 4),
}


def gradient(graph, policy):
    """Returns a function that computes the gradients of a layer with remat."""

    def loss(state, x):
        def run(state, x):
            return nnx.merge(graph, state)(x)

        return jnp.sum(jnp.sin(jax.checkpoint(run, policy=policy)(state, x)))

    return jax.jit(jax.grad(loss, (0, 1)))


@pytest.fixture(scope="module")
def layer():
    """Returns a layer's graph and parameters, x, and the gradients without remat."""
    x = normal(0, X)
    with jax.set_mesh(mesh_of(1, 4)):
        graph, state = nnx.split(TransformerLayer(16, 32, 4, rngs=nnx.Rngs(0)))
        everything = gradient(graph, jax.checkpoint_policies.everything_saveable)
        return graph, state, x, everything(state, x)


@pytest.mark.parametrize("name", POLICIES)
def test_a_remat_policy_selects_the_gemms_that_are_recomputed(name, layer):
    policy, num_gathers, num_scatters = POLICIES[name]
    graph, state, x, expected = layer
    with jax.set_mesh(mesh_of(1, 4)):
        step = gradient(graph, policy).lower(state, x).compile()
        found = calls(step.as_text())
        assert (found[AG], found[RS]) == (num_gathers, num_scatters)
        assert_trees_close(step(state, x), expected, rtol=1e-4)


def names_in(function, *operands):
    text = str(jax.make_jaxpr(function)(*operands))
    return {part.split("]")[0] for part in text.split("name[name=")[1:]}


def test_checkpoint_names_contain_the_name_of_the_call():
    def run(x, w, name, gathered):
        given = {"axis_name": "tp", "ub_name": name, "return_gathered": gathered}
        y = ub.all_gather_matmul(x, w, **given)
        return y[0] if gathered else y

    def found(name, gathered=False):
        def loss(x, w):
            return jnp.sum(run(x, w, name, gathered))

        mapped = on_ranks(
            jax.grad(loss, (0, 1)),
            tp_mesh(2),
            (P("tp"), P(None, "tp")),
            (P("tp"), P(None, "tp")),
        )
        return names_in(mapped, jnp.ones((4, 6)), jnp.ones((6, 8)))

    assert found(None) == {"jax_ub.y", "jax_ub.x"}
    both = {"jax_ub.y", "jax_ub.x", "jax_ub.fc1.y", "jax_ub.fc1.x"}
    assert found("fc1") == both
    assert {"jax_ub.gathered", "jax_ub.fc1.gathered"} <= found("fc1", gathered=True)


def test_operations_have_the_names_of_their_overlaps():
    seq = ops.Sequential(linear("column", 8, 8, "fc1"), ops.GELU())
    mapped = on_ranks(
        lambda p, x: jnp.sum(seq(p, x)).reshape(1),
        tp_mesh(2),
        (seq.specs(), P("tp")),
        P("tp"),
    )
    params = seq.init(jax.random.key(0))
    loss = lambda p, x: jnp.sum(mapped(p, x))  # noqa: E731
    found = names_in(jax.grad(loss), params, jnp.ones((4, 8)))
    assert {"jax_ub.x", "jax_ub.fc1.x"} <= found
