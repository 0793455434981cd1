"""AG+GEMM: values and gradients of every method against the plain product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from layouts import connect
from operands import assert_equal, small_integers
from programs import (
    by_method,
    calls,
    collectives,
    compiled_text,
    dp_tp_mesh,
    on_ranks,
    tp_mesh,
)

import jax_ub as ub

METHODS = ("auto", "direct", "ring_exchange", "pipeline", "bulk", "external", "xla")
ROWS, COLUMNS, FEATURES = P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")


def operands(num_ranks, dtype="float32"):
    x = small_integers(0, (4, 3 * num_ranks, 6), dtype)
    w = small_integers(1, (6, 5 * num_ranks), dtype)
    return x, w, small_integers(2, (5 * num_ranks,), dtype)


def weighted(y, seed=9):
    """Returns a loss whose gradients are small integers."""
    return jnp.sum(y.astype(jnp.float32) * small_integers(seed, y.shape))


def plain(x, w, b):
    return x @ w + b


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, dy, *values):
    """Returns a result, and gradients for the gradient `dy` of the result."""
    y, pull = jax.vjp(function, *values)
    return y, pull(dy)


@covering(method=METHODS, check_vma=[True, False])
def test_values_and_gradients_are_exact(method, check_vma):
    mesh = dp_tp_mesh(2, 4)
    options = by_method(method, mesh)
    layer = on_ranks(
        lambda x, w, b: ub.all_gather_matmul(x, w, axis_name="tp", bias=b, **options),
        mesh,
        (ROWS, COLUMNS, P("tp")),
        FEATURES,
        check_vma=check_vma,
    )
    values = operands(4)
    loss = lambda function, *values: weighted(function(*values))  # noqa: E731
    step = jax.jit(jax.value_and_grad(functools.partial(loss, layer), (0, 1, 2)))
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, plain), (0, 1, 2)))
    assert_equal(step(*values), expected(*values))


@pytest.mark.parametrize("num_ranks", [1, 5, 16, *nightly(2, 3)])
def test_any_number_of_ranks(num_ranks):
    layer = on_ranks(
        lambda x, w, b: ub.all_gather_matmul(x, w, axis_name="tp", bias=b),
        tp_mesh(num_ranks),
        (P(None, "tp"), COLUMNS, P("tp")),
        P(None, None, "tp"),
    )
    values = operands(num_ranks)
    dy = small_integers(3, (*values[0].shape[:2], 5 * num_ranks))
    expected = value_and_gradients(plain, dy, *values)
    assert_equal(value_and_gradients(layer, dy, *values), expected)


@covering(
    method=["direct", "ring_exchange", "xla"]
    + nightly("auto", "pipeline", "bulk", "external"),
    axes=[(0, None), (None, 0)],
)
def test_vmap_over_one_kernel_of_two(method, axes):
    """The gathered x is equal in all examples, and has a cotangent, too."""
    mesh = tp_mesh(4)
    options = by_method(method, mesh)
    x, kernels = small_integers(0, (8, 6)), small_integers(1, (3, 6, 12))
    ws = tuple(kernels[0] if axis is None else kernels for axis in axes)

    def layer(x, ws):
        ys, gathered = ub.all_gather_matmul(
            x, ws, axis_name="tp", return_gathered=True, **options
        )
        return *ys, gathered

    stacked = P(None, None, "tp")
    function = on_ranks(
        jax.vmap(layer, (None, axes)),
        mesh,
        (P("tp"), tuple(COLUMNS if axis is None else stacked for axis in axes)),
        (stacked, stacked, P()),
        check_vma=False,  # the gathered x does not vary
    )
    plain_layer = jax.vmap(lambda x, ws: (x @ ws[0], x @ ws[1], x), (None, axes))

    def loss(function, *values):
        return sum(weighted(y, i) for i, y in enumerate(function(*values)))

    step = jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1)))
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, plain_layer), (0, 1)))
    assert_equal(step(x, ws), expected(x, ws))


@pytest.mark.parametrize("method", ["auto", "bulk", *nightly("ring_exchange")])
def test_kernels_in_a_tuple_share_one_gather(method):
    mesh = dp_tp_mesh(2, 2)
    options = by_method(method, mesh)

    def layer(x, ws, bs):
        return ub.all_gather_matmul(x, ws, axis_name="tp", bias=bs, **options)

    function = on_ranks(layer, mesh, (ROWS, COLUMNS, P("tp")), FEATURES)
    x, w, b = operands(2)
    v = small_integers(4, (6, 14))
    values = x, (w, v), (b, jnp.zeros(14))

    def loss(product, x, ws, bs):
        y, z = product(x, ws, bs)
        return weighted(y) + weighted(z, 8)

    def plain_pair(x, ws, bs):
        return tuple(plain(x, w, b) for w, b in zip(ws, bs, strict=True))

    step = jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1, 2)))
    expected = jax.value_and_grad(functools.partial(loss, plain_pair), (0, 1, 2))
    assert_equal(step(*values), jax.jit(expected)(*values))
    assert calls(compiled_text(function, *values)) == {"all_gather_matmul": 1}
    found = calls(compiled_text(step, *values))
    assert (
        found
        == {
            "auto": {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "wgrad": 1},
            "ring_exchange": {
                "all_gather_matmul": 1,
                "matmul_reduce_scatter": 1,
                "all_gather": 1,
                "wgrad": 1,
            },
            "bulk": {
                "all_gather_matmul": 1,
                "bulk_all_gather": 1,
                "bulk_reduce_scatter": 1,
            },
        }[method]
    )


@covering(method=METHODS, pair=[False, True])
def test_transposed_kernels_are_read_in_place(method, pair):
    mesh = tp_mesh(4)
    options = by_method(method, mesh)

    def layer(x, ws, bs, mgs):
        return ub.all_gather_matmul(
            x,
            ws,
            axis_name="tp",
            bias=bs,
            main_grad=mgs,
            rhs_transposed=True,
            **options,
        )

    kernels = P("tp")
    function = on_ranks(
        layer,
        mesh,
        (P(None, "tp"), kernels, P("tp"), kernels),
        P(None, None, "tp"),
    )
    x, w, b = operands(4)
    ws, bs = (w.T, small_integers(4, (28, 6))), (b, jnp.zeros(28))
    mgs = tuple(small_integers(5, w.shape) for w in ws)
    if not pair:
        ws, bs, mgs = ws[:1], bs[:1], mgs[:1]

    def loss(product, x, ws, bs, mgs):
        return sum(weighted(y, i) for i, y in enumerate(product(x, ws, bs, mgs)))

    def plain_kernels(x, ws, bs, mgs):
        # The cotangent of a main_grad is its new value.
        return tuple(
            plain(x, (w + mg - jax.lax.stop_gradient(mg)).T, b)
            for w, b, mg in zip(ws, bs, mgs, strict=True)
        )

    values = x, ws, bs, mgs
    step = jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1, 2, 3)))
    expected, (dx, dws, dbs, _) = jax.jit(
        jax.value_and_grad(functools.partial(loss, plain_kernels), (0, 1, 2, 3))
    )(*values)
    found, gradients = step(*values)
    assert_equal(found, expected)
    assert_equal(gradients[0], dx)
    assert_equal(gradients[2], dbs)
    for new, old, dw, unused in zip(gradients[3], mgs, dws, gradients[1], strict=True):
        assert_equal(new, old + np.asarray(dw))
        assert_equal(unused, np.zeros_like(dw))
    if method != "xla":
        assert " transpose(" not in compiled_text(step, *values)


def test_kernel_without_a_gradient_leaves_the_others_right():
    x, w, _ = operands(2)
    v = small_integers(4, (6, 14))
    function = on_ranks(
        lambda x, ws: ub.all_gather_matmul(x, ws, axis_name="tp"),
        dp_tp_mesh(2, 2),
        (ROWS, COLUMNS),
        FEATURES,
    )
    step = jax.grad(lambda x, ws: weighted(function(x, ws)[1]), (0, 1))
    dx, (dw, dv) = jax.jit(step)(x, (w, v))
    expected_dx, expected_dv = jax.grad(lambda x, v: weighted(x @ v), (0, 1))(x, v)
    assert_equal((dx, dv), (expected_dx, expected_dv))
    assert_equal(dw, jnp.zeros_like(w))


@pytest.mark.parametrize("method", ["auto", "bulk", *nightly("ring_exchange")])
def test_gathered_operand_has_a_gradient_and_is_saved(method):
    x, w, _ = operands(2)
    mesh = dp_tp_mesh(2, 2)
    options = by_method(method, mesh)

    def layer(x, w):
        return ub.all_gather_matmul(
            x, w, axis_name="tp", return_gathered=True, **options
        )

    function = on_ranks(layer, mesh, (ROWS, COLUMNS), (FEATURES, P("dp", None, "tp")))

    def loss(x, w):
        # The gathered copies of both ranks are concatenated.
        y, gathered = function(x, w)
        return weighted(y) + weighted(gathered, 8)

    def plain_loss(x, w):
        return weighted(x @ w) + weighted(jnp.concatenate([x, x], -1), 8)

    step = jax.jit(jax.grad(loss, (0, 1)))
    assert_equal(step(x, w), jax.grad(plain_loss, (0, 1))(x, w))
    text = compiled_text(
        jax.jit(jax.grad(lambda x, w: weighted(function(x, w)[0]), (0, 1))), x, w
    )
    backward = {"matmul_reduce_scatter": 1, "wgrad": 1}
    if method == "bulk":
        backward = {"matmul": 1, "bulk_reduce_scatter": 1}
    assert calls(text) == {"all_gather_matmul": 1, **backward}


FULL = {
    "auto": {"matmul_reduce_scatter": 1, "wgrad": 1},
    "ring_exchange": {"matmul_reduce_scatter": 1, "all_gather": 1, "wgrad": 1},
    "pipeline": {"matmul_reduce_scatter": 1, "all_gather": 1, "wgrad": 1},
    "external": {"matmul_reduce_scatter": 1, "all_gather": 1, "wgrad": 1},
    "bulk": {"bulk_all_gather": 1, "bulk_reduce_scatter": 1},
}


@pytest.mark.parametrize(
    "method", ["auto", "ring_exchange", "bulk", *nightly("pipeline", "external")]
)
def test_frozen_operands_skip_their_gemm(method):
    x, w, _ = operands(2)
    mesh = tp_mesh(2)
    options = by_method(method, mesh)
    function = on_ranks(
        lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp", **options),
        mesh,
        (P(None, "tp"), COLUMNS),
        P(None, None, "tp"),
    )

    def backward(*wanted):
        gradient = jax.jit(jax.grad(lambda *v: weighted(function(*v)), wanted))
        text = compiled_text(gradient, x, w)
        assert not collectives(text)
        found = calls(text)
        found.subtract(["all_gather_matmul"])
        return +found

    assert backward(0, 1) == FULL[method]
    assert backward(0) == {"matmul_reduce_scatter": 1}
    assert backward(1) == (
        {"wgrad": 1} if method == "auto" else {"all_gather": 1, "wgrad": 1}
    )


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bfloat16", None), ("float16", "float32")]
)
def test_results_and_gradients_have_their_dtypes(dtype, out_dtype):
    x, w, b = operands(2, dtype)
    function = on_ranks(
        lambda x, w, b: ub.all_gather_matmul(
            x, w, axis_name="tp", bias=b, out_dtype=out_dtype
        ),
        tp_mesh(2),
        (P(None, "tp"), COLUMNS, P("tp")),
        P(None, None, "tp"),
    )
    y, pull = jax.vjp(function, x, w, b.astype("float32"))
    assert y.dtype == (out_dtype or dtype)
    assert [g.dtype for g in pull(y)] == [dtype, dtype, "float32"]


def test_several_axes_are_one():
    x, w, b = operands(8)
    layer = on_ranks(
        lambda x, w, b: ub.all_gather_matmul(x, w, axis_name=("tp", "dp"), bias=b),
        connect(dp_tp_mesh(2, 4), ("tp", "dp")),
        (P(None, ("tp", "dp")), P(None, ("tp", "dp")), P(("tp", "dp"))),
        P(None, None, ("tp", "dp")),
    )
    dy = small_integers(3, (*x.shape[:2], w.shape[1]))
    expected = value_and_gradients(plain, dy, x, w, b)
    assert_equal(value_and_gradients(layer, dy, x, w, b), expected)


def test_any_order_of_devices():
    x, w, b = operands(4)
    devices = dp_tp_mesh(2, 4).devices[::-1, [2, 0, 3, 1]]
    layer = on_ranks(
        lambda x, w, b: ub.all_gather_matmul(x, w, axis_name="tp", bias=b),
        jax.sharding.Mesh(devices.T, ("tp", "dp")),
        (ROWS, COLUMNS, P("tp")),
        FEATURES,
    )
    dy = small_integers(3, (*x.shape[:2], w.shape[1]))
    expected = value_and_gradients(plain, dy, x, w, b)
    assert_equal(value_and_gradients(layer, dy, x, w, b), expected)
