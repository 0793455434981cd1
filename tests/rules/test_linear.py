"""The linear layer: every way to shard it, alone and as a column-row pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from layouts import whole
from operands import assert_equal, small_integers
from programs import (
    calls,
    collectives,
    compiled_text,
    devices,
    dp_tp_mesh,
    on_ranks,
    tp_mesh,
)

import jax_ub as ub


def operands(dtype="float32"):
    x = small_integers(0, (4, 8, 12), dtype)
    w1, b1 = small_integers(1, (12, 16), dtype), small_integers(2, (16,), dtype)
    w2, b2 = small_integers(3, (16, 12), dtype), small_integers(4, (12,), dtype)
    return x, w1, b1, w2, b2


def weighted(y):
    return jnp.sum(y.astype(jnp.float32) * small_integers(9, y.shape))


def plain(x, w1, b1, w2, b2):
    return (x @ w1 + b1) @ w2 + b2


def pair(mesh, *, sequence_parallel, check_vma=True, method=None):
    options = {
        "axis_name": "tp",
        "sequence_parallel": sequence_parallel,
        "method": method,
    }

    def layers(x, w1, b1, w2, b2):
        h = ub.linear(x, w1, b1, parallel="column", **options)
        return ub.linear(h, w2, b2, parallel="row", **options)

    groups = "dp" if "dp" in mesh.axis_names else None
    x = P(groups, "tp") if sequence_parallel else P(groups)
    specs = (x, P(None, "tp"), P("tp"), P("tp"), P())
    return on_ranks(layers, mesh, specs, x, check_vma=check_vma)


@covering(
    parallel=[None, "column", "column, whole rows"],
    method=["auto", "ring_exchange", "xla"],
)
def test_an_embedding_is_the_output_projection_too(parallel, method):
    kind, linear_without_gather = parallel and "column", parallel != "column"

    def logits(x, embedding, b, main_grad):
        return ub.linear(
            x,
            embedding,
            b,
            parallel=kind,
            axis_name=kind and "tp",
            sequence_parallel=not linear_without_gather,
            method=method,
            main_grad=main_grad,
            rhs_transposed=True,
        )

    rows = P() if kind is None else P("tp")
    x_rows = P() if linear_without_gather else P(None, "tp")
    y = P() if kind is None else P(None, None, "tp")
    layer = on_ranks(logits, tp_mesh(4), (x_rows, rows, rows, rows), y)
    x, embedding = small_integers(0, (2, 8, 12)), small_integers(1, (16, 12))
    values = x, embedding, small_integers(2, (16,)), small_integers(3, (16, 12))
    pull = jax.jit(lambda dy, *v: jax.vjp(layer, *v)[1](dy))
    y, expected = jax.vjp(plain_logits, *values[:3])
    assert_equal(jax.jit(layer)(*values), y)
    dy = small_integers(4, y.shape)
    dx, dw, db = expected(dy)
    assert_equal(pull(dy, *values), (dx, jnp.zeros_like(dw), db, values[3] + dw))


def plain_logits(x, embedding, b):
    return x @ embedding.T + b


@covering(sequence_parallel=[True, False], num_ranks=[1, 2, 3, 8])
def test_a_row_kernel_may_be_stored_as_out_in(sequence_parallel, num_ranks):
    rows = P("tp") if sequence_parallel else P()

    def layer(x, w, b, main_grad):
        return ub.linear(
            x,
            w,
            b,
            parallel="row",
            axis_name="tp",
            sequence_parallel=sequence_parallel,
            main_grad=main_grad,
            rhs_transposed=True,
        )

    kernel = P(None, "tp")
    specs = (P(None, "tp"), kernel, P(), kernel)
    layer = on_ranks(layer, tp_mesh(num_ranks), specs, rows)
    x = small_integers(0, (3 * num_ranks, 5 * num_ranks))
    w = small_integers(1, (7, 5 * num_ranks))
    values = x, w, small_integers(2, (7,)), small_integers(3, w.shape)
    dy = small_integers(4, (len(values[0]), 7))

    def value_and_gradients(function, *values):
        y, pull = jax.vjp(function, *values)
        return y, pull(dy)

    step = jax.jit(value_and_gradients, static_argnums=0)
    y, (dx, dw, db) = step(plain_logits, *values[:3])
    new = values[3] + np.asarray(dw)
    assert_equal(step(layer, *values), (y, (dx, np.zeros_like(dw), db, new)))


@covering(
    method=["auto", "ring_exchange", "pipeline", "xla"],
    sequence_parallel=[True, False],
    check_vma=[True, False],
)
def test_pair_and_its_gradients_are_exact(method, sequence_parallel, check_vma):
    layers = pair(
        dp_tp_mesh(2, 4),
        sequence_parallel=sequence_parallel,
        check_vma=check_vma,
        method=method,
    )
    values, wanted = operands(), (0, 1, 2, 3, 4)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layers(*v)), wanted))
    expected = jax.value_and_grad(lambda *v: weighted(plain(*v)), wanted)(*values)
    assert_equal(step(*values), expected)


@covering(dtype=["float32", "bfloat16"], method=["auto", "xla"])
def test_pair_does_not_need_the_promotion_of_ranks_or_dtypes(method, dtype):
    layers = pair(tp_mesh(4), sequence_parallel=True, method=method)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layers(*v)), (0, 1, 2, 3, 4)))
    values = operands(dtype)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = step(*values)
    assert_equal(found, step(*values))


@pytest.mark.parametrize(
    "recipe", [ub.fp8.MXFP8BlockScaling, *nightly(ub.fp8.RowwiseScaling)]
)
def test_fp8_does_not_need_the_promotion_of_dtypes(recipe):
    x, w = (small_integers(i, (32, 64), "bfloat16") for i in range(2))

    def loss(x, w):
        return weighted(ub.linear(x, w.T, fp8=recipe()))

    step = jax.value_and_grad(loss, (0, 1))
    with jax.numpy_dtype_promotion("strict"):
        found = step(x, w)
    assert_equal(found, step(x, w))


def test_pair_with_sequence_parallelism_is_one_call_for_every_gemm():
    values = operands()
    layers = pair(tp_mesh(4), sequence_parallel=True)
    step = jax.jit(jax.grad(lambda *v: jnp.sum(layers(*v) ** 2), (0, 1, 3)))
    text = compiled_text(step, *values)
    # The forward pass has one call of each op. In the backward pass, the dgrad of each
    # layer is the op of the other layer, and there are two wgrads.
    assert calls(text) == {
        "all_gather_matmul": 2,
        "matmul_reduce_scatter": 2,
        "wgrad": 2,
    }
    assert not collectives(text)


def test_pair_without_sequence_parallelism_sums_once_each_way():
    values = operands()
    layers = pair(tp_mesh(4), sequence_parallel=False)
    step = jax.jit(jax.grad(lambda *v: jnp.sum(layers(*v) ** 2), (0, 1, 3)))
    text = compiled_text(step, *values)
    assert calls(text) == {"matmul": 2, "matmul_all_reduce": 2, "wgrad": 2}
    assert not collectives(text)


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_frozen_operand_of_a_plain_layer_skips_its_gemm(frozen):
    x, w, _, _, _ = operands()
    step = jax.jit(
        jax.grad(lambda x, w: jnp.sum(ub.linear(x, w) ** 2), "xw".index(frozen) ^ 1)
    )
    found = calls(compiled_text(step, x, w))
    assert found["matmul"] == 1 + (frozen == "w")
    assert found["wgrad"] == (frozen == "x")


@pytest.mark.parametrize("layer", ["linear", "ops.Linear"])
def test_gradients_of_a_plain_layer_work_where_jit_is_disabled(layer):
    def call(x, w):
        if layer == "linear":
            return ub.linear(x, w)
        return ub.ops.Sequential(ub.ops.Linear(6, 4, use_bias=False))(
            ({"kernel": w},), x
        )

    def gradients(function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), (0, 1))(x, w)

    x, w = small_integers(0, (8, 6)), small_integers(1, (6, 4))
    with jax.disable_jit():
        found = gradients(call)
    assert_equal(found, gradients(jnp.matmul))


@pytest.mark.parametrize("kind", [None, "column", "row"])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (2, 3, 1, 16)])
def test_takes_activations_of_any_rank(shape, kind):
    x, w = small_integers(0, shape), small_integers(1, (16, 8))

    def layer(x, w):
        return ub.linear(x, w, parallel=kind, axis_name="tp", sequence_parallel=False)

    features = P(*(None for _ in shape[:-1]), "tp")
    specs = {
        None: ((P(), P()), P()),
        "column": ((P(), P(None, "tp")), features),
        "row": ((features, P("tp")), P()),
    }[kind]
    assert_equal(on_ranks(layer, tp_mesh(4), *specs)(x, w), x @ w)


def test_varying_activations_keep_the_gradient_of_their_rank():
    x, w = small_integers(0, (3, 4)), small_integers(1, (4, 8))

    def gradient(x, w):
        x = jax.lax.pcast(x, "tp", to="varying")
        layer = lambda x: ub.linear(  # noqa: E731
            x, w, parallel="column", axis_name="tp", sequence_parallel=False
        )
        return jax.grad(lambda x: jnp.sum(layer(x)))(x)[None]

    found = on_ranks(gradient, tp_mesh(2), (P(), P(None, "tp")), P("tp"))(x, w)
    ones = jnp.ones((3, 4))
    assert_equal(found, jnp.stack([ones @ w[:, :4].T, ones @ w[:, 4:].T]))


@pytest.mark.parametrize("kind", ["colunm", 3])
def test_unknown_kind_names_the_nearest(kind):
    message = r"linear: parallel = .* is not a way.*Known: 'column', 'row'"
    with pytest.raises(ub.errors.UnknownNameError, match=message):
        ub.linear(jnp.ones((2, 2)), jnp.ones((2, 2)), parallel=kind, axis_name="tp")


def test_kind_without_an_axis_is_refused():
    message = "linear: parallel = 'row' needs the mesh axis.*axis_name = None"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        ub.linear(jnp.ones((2, 2)), jnp.ones((2, 2)), parallel="row")


SHARDED_OPERANDS = {  # of x, w and b
    "rows": (P("dp"), P(), P()),
    "FSDP": (P("dp"), P("dp", "tp"), P("tp")),
    "columns": (P("dp", "tp"), P(None, "tp"), P()),
    "kernel rows": (P(), P("tp"), P()),
}


@covering(name=SHARDED_OPERANDS, kind=["main_grad", "fp8"])
def test_gradients_on_an_explicit_mesh_need_unsharded_features(name, kind):
    shapes = ((8, 16), (16, 4), (4,))
    arrays = [small_integers(i, shape) for i, shape in enumerate(shapes)]

    def loss(x, w, b):
        options = (
            {"main_grad": w}
            if kind == "main_grad"
            else {"fp8": ub.fp8.Float8CurrentScaling()}
        )
        return ub.linear(x, w, b, method="xla", **options).sum()

    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), devices=devices(4))):
        x, w, b = map(jax.device_put, arrays, SHARDED_OPERANDS[name])
        assert abs(jax.jit(loss)(x, w, b) - loss(*arrays)) < 1e-5
        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        if name == "rows":
            for found, wanted in zip(step(x, w, b), step(*arrays), strict=True):
                np.testing.assert_allclose(whole(found), wanted, rtol=1e-5)
            return
        operand = "x" if name == "columns" else "w"
        text = f"linear: an explicit mesh shards the features of {operand} "
        with pytest.raises(ub.errors.UnsupportedOverlapError, match=text):
            step(x, w, b)


@pytest.mark.parametrize("name", SHARDED_OPERANDS)
def test_method_xla_takes_operands_that_an_explicit_mesh_shards(name):
    shapes = ((8, 16), (16, 4), (4,))
    arrays = [small_integers(i, shape) for i, shape in enumerate(shapes)]
    xla = functools.partial(ub.linear, method="xla")

    def gradients(function):
        def loss(*arrays):
            return (function(*arrays) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), devices=devices(4))):
        arrays = list(map(jax.device_put, arrays, SHARDED_OPERANDS[name]))
        found, wanted = gradients(xla), gradients(lambda x, w, b: x @ w + b)
    assert_equal(found, wanted)
    assert list(map(jax.typeof, found)) == list(map(jax.typeof, wanted))
