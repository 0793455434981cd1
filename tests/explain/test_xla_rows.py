"""Tests the rows of `ub.explain` for collectives and dots that XLA runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from overlapped_mlp import SPECS, mlp, operands
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.prediction import estimate as simulate


def test_pairs_of_a_collective_and_a_dot_are_listed():
    def layers(x, up, down):
        h = jax.lax.all_gather(x, "tp", axis=0, tiled=True) @ up
        return jax.lax.psum_scatter(h @ down, "tp", scatter_dimension=0, tiled=True)

    found = ub.explain(on_ranks(layers, tp_mesh(4), SPECS, P("tp")), *operands())
    assert [(row.op, row.overlapped, row.reason) for row in found.rows] == [
        ("all-gather + dot", False, "XLA's own: could be one ub.all_gather_matmul"),
        (
            "dot + reduce-scatter",
            False,
            "XLA's own: could be one ub.matmul_reduce_scatter",
        ),
    ]
    assert found.rows[0].moved_bytes == 3 * 16 * 16 * 4
    assert all("test_xla_rows.py:" in row.source for row in found.rows)
    assert " test_xla_rows.py:" in str(found)
    times = [row.predicted_s for row in found.rows]
    # The times of the pairs are those of method "xla".
    calls = ub.explain(mlp(), *operands()).rows
    sizes = {"M": 64, "P": 4, "dtype": np.float32, "hardware": "cpu"}
    assert times == [
        simulate.predict(calls[0].op, "xla", K=16, N=32, **sizes),
        simulate.predict(calls[1].op, "xla", K=32, N=16, **sizes),
    ]


def test_collectives_of_the_partitioner_are_listed():
    def layers(x, up, down):
        y = (x @ up) @ down
        return jax.lax.with_sharding_constraint(y, NamedSharding(tp_mesh(4), P()))

    found = ub.explain(layers, *operands())
    # The partitioner chooses the collectives.
    assert {row.method for row in found.rows} == {"xla"}
    assert found.title == f"layers: 0 of {len(found.rows)} overlapped"
    assert all(row.moved_bytes > 0 for row in found.rows)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_layers_that_jax_ub_method_turned_off_are_named(pass_name, monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "xla")
    run = mlp()
    if pass_name == "backward":
        run = jax.grad(lambda *args: mlp()(*args).sum(), argnums=(0, 1, 2))
    ub.fallbacks(clear=True)
    found = ub.explain(run, *operands())
    assert {row.scope for row in found.rows} == {"up", "matmul_reduce_scatter"}
    assert {row.reason for row in found.rows} == {'method = "xla" (from JAX_UB_METHOD)'}
    assert ub.fallbacks() == ()


def test_local_layers_of_method_xla_are_not_listed():
    layer = functools.partial(ub.linear, parallel=None, axis_name=None, method="xla")
    assert ub.explain(layer, jnp.ones((8, 4)), jnp.ones((4, 4))).rows == ()


def test_reductions_of_other_values_than_the_dot_are_not_pairs():
    def layers(x, w):
        logits = x @ w
        largest = jax.lax.pmax(logits.max(-1), "tp")
        return jax.lax.psum(jnp.exp(logits - largest[:, None]).sum(-1), "tp")

    run = on_ranks(layers, tp_mesh(4), (P(), P(None, "tp")), P())
    found = ub.explain(run, jnp.ones((64, 16)), operands()[1])
    assert found.rows == ()
    assert "without a dot next to them: all-reduce x 2" in found.notes[0]


@pytest.mark.parametrize("num_gathers", [1, 2])
def test_several_gathers_of_activations_have_a_note(num_gathers):
    def gathered(x, up, down):
        h = ub.all_gather_matmul(x, up, axis_name="tp")
        y = ub.matmul_reduce_scatter(h, down, axis_name="tp")
        outputs = [jnp.tanh(y), jnp.cos(y)][:num_gathers]
        return [jax.lax.all_gather(z, "tp", axis=0, tiled=True) for z in outputs]

    run = on_ranks(gathered, tp_mesh(4), SPECS, P(), check_vma=False)
    x, up, down = operands()
    notes = ub.explain(run, x, up, down).notes
    advice = (
        "2 all-gathers are of activations or their gradients: on an explicit mesh, "
        "shard the tokens over the axis after the embedding"
    )
    assert (advice in notes) is (num_gathers == 2)


def test_gathered_kernels_and_their_gradients_have_no_note():
    def gradients(x, up):
        up = jax.lax.all_gather(up, "tp", axis=1, tiled=True)

        def loss(x, up):
            y = ub.all_gather_matmul(x, up[:, :8], axis_name="tp")
            return (y**2).sum()

        dw = jax.grad(loss, 1)(x, up)[:, :8]
        outputs = jnp.tanh(dw), jnp.cos(dw)
        return [jax.lax.all_gather(z, "tp", axis=1, tiled=True) for z in outputs]

    run = on_ranks(gradients, tp_mesh(4), SPECS[:2], P(), check_vma=False)
    found = ub.explain(run, *operands()[:2])
    assert "without a dot next to them: all-gather x " in found.notes[-1]
