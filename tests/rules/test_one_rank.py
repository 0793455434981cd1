"""Over one rank nothing is communicated: no collective call, and none of XLA's."""

import functools

import jax
import jax.numpy as jnp
import pytest
from covering import covering, nightly
from flax import nnx
from flax_models import random_layer
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import calls, collectives, compiled_text, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub import ops
from jax_ub.flax import TransformerLayer, linen

METHODS = (None, "direct", "ring_exchange", "pipeline", "external")
PRODUCTS = {"matmul", "wgrad"}
SPECS = {
    "column": (P("tp"), P(None, "tp"), P("tp"), P(None, "tp")),
    "row": (P(None, "tp"), P("tp"), P(), P("tp")),
    "column, whole rows": (P(), P(None, "tp"), P("tp"), P(None, "tp")),
    "row, whole rows": (P(None, "tp"), P("tp"), P(), P()),
}


def assert_only_products(function, *operands, check_vma=True):
    text = compiled_text(jax.jit(function), *operands)
    assert set(calls(text)) <= PRODUCTS
    # With check_vma=False, jax.shard_map itself sums the gradients of replicated
    # operands.
    assert not (check_vma and collectives(text))
    return calls(text)


@covering(kind=SPECS, method=METHODS, check_vma=[True, False])
def test_a_linear_is_one_product_for_each_gemm(kind, method, check_vma):
    layer = functools.partial(
        ub.linear,
        parallel=kind.split(",")[0],
        sequence_parallel="," not in kind,
        axis_name="tp",
        method=method,
    )
    *specs, out = SPECS[kind]
    run = on_ranks(layer, tp_mesh(1), tuple(specs), out, check_vma=check_vma)
    x, w, b = (small_integers(i, s) for i, s in enumerate(((8, 6), (6, 4), (4,))))
    dy = small_integers(3, (8, 4))
    step = jax.value_and_grad(lambda *v: jnp.sum(run(*v) * dy), (0, 1, 2))
    found = assert_only_products(step, x, w, b, check_vma=check_vma)
    assert found == {"matmul": 2, "wgrad": 1}
    expected = jax.value_and_grad(lambda x, w, b: jnp.sum((x @ w + b) * dy), (0, 1, 2))
    assert_equal(step(x, w, b), expected(x, w, b))


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_in_a_tuple_accumulate_and_return_what_is_gathered(check_vma):
    def layer(x, w, v, main_grads):
        ys, gathered = ub.all_gather_matmul(
            x, (w, v), axis_name="tp", return_gathered=True, main_grad=main_grads
        )
        return *ys, gathered

    columns = P(None, "tp")
    specs = (P("tp"), columns, columns, columns)
    out = (columns, columns, P("tp"))
    run = on_ranks(layer, tp_mesh(1), specs, out, check_vma=check_vma)
    x, w, v = (small_integers(i, s) for i, s in enumerate(((8, 6), (6, 4), (6, 2))))
    main_grads = (small_integers(3, w.shape), small_integers(4, v.shape))
    y, z, gathered = run(x, w, v, main_grads)
    assert_equal((y, z, gathered), (x @ w, x @ v, x))
    loss = lambda x, mg: sum(a.sum() for a in run(x, w, v, mg))  # noqa: E731
    step = jax.grad(loss, (0, 1))
    assert_only_products(step, x, main_grads)
    dx, new = step(x, main_grads)
    ones = jnp.ones((8, 4)), jnp.ones((8, 2))
    assert_equal(dx, ones[0] @ w.T + ones[1] @ v.T + 1)
    added = [mg + x.T @ one for mg, one in zip(main_grads, ones, strict=True)]
    assert_equal(new, tuple(added))


@pytest.mark.parametrize("check_vma", [True, False])
def test_collectives_are_the_identity(check_vma):
    gather, scatter = ops.AllGather("tp"), ops.ReduceScatter("tp")

    def function(x):
        y = ub.all_reduce(x, axis_name="tp")
        return ops.Sequential(gather, ops.AllReduce("tp"), scatter)(({}, {}, {}), y)

    run = on_ranks(function, tp_mesh(1), P("tp"), P("tp"), check_vma=check_vma)
    x = small_integers(0, (8, 4))
    step = jax.value_and_grad(lambda x: jnp.sum(run(x) * x))
    assert not assert_only_products(step, x)
    assert_equal(step(x), (jnp.sum(x * x), 2 * x))


@pytest.mark.parametrize("sequence_parallel", [True, *nightly(False)])
def test_a_transformer_layer_is_its_products(sequence_parallel):
    x = jnp.ones((2, 8, 16))
    with jax.set_mesh(tp_mesh(1)):
        options = {"sequence_parallel": sequence_parallel}
        layer = random_layer(TransformerLayer, 16, 32, 4, **options)
        graph, state = nnx.split(layer)

        def loss(state, x):
            return jnp.sum(nnx.merge(graph, state)(x) ** 2)

        found = assert_only_products(jax.grad(loss, (0, 1)), state, x)
        assert found["matmul"] >= 10
        plain = linen.TransformerLayer(16, 32, 4, **options)
        variables = jax.eval_shape(plain.init, jax.random.key(0), x)
        again = assert_only_products(
            jax.grad(lambda v, x: jnp.sum(plain.apply(v, x) ** 2), (0, 1)), variables, x
        )
    assert again == found


def test_a_bulk_backward_is_its_products():
    ub.initialize_ub((64, 64), 1, mesh=tp_mesh(1))

    def layer(x, w):
        return ub.all_gather_matmul(x, w, axis_name="tp", ub_name="qkv")

    run = on_ranks(layer, tp_mesh(1), (P("tp"), P(None, "tp")), P(None, "tp"))
    x, w = small_integers(0, (8, 6)), small_integers(1, (6, 4))
    step = jax.grad(lambda x, w: jnp.sum(run(x, w)), (0, 1))
    assert assert_only_products(step, x, w) == {"matmul": 1, "wgrad": 1}
    ones = jnp.ones((8, 4))
    assert_equal(step(x, w), (ones @ w.T, x.T @ ones))
