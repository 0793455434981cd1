"""GEMM+RS, GEMM+AR and AR: values and gradients of every method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from operands import assert_equal, small_integers
from programs import calls, collectives, compiled_text, dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub

METHODS = ("auto", "direct", "ring_exchange", "pipeline", "external", "xla")
# The sharding of result and residual.
OPS = {ub.matmul_reduce_scatter: P("dp", "tp"), ub.matmul_all_reduce: P("dp")}


def operands(num_ranks, dtype="float32"):
    x = small_integers(0, (4, 3 * num_ranks, 6 * num_ranks), dtype)
    w = small_integers(1, (6 * num_ranks, 5), dtype)
    residual = small_integers(3, (4, 3 * num_ranks, 5), dtype)
    return x, w, small_integers(2, (5,), dtype), residual


def plain(x, w, b, residual):
    return x @ w + b + residual


def weighted(y):
    return jnp.sum(y.astype(jnp.float32) * small_integers(9, y.shape))


@covering(2, op=OPS, method=METHODS, check_vma=[True, False])
def test_values_and_gradients_are_exact(op, method, check_vma):
    layer = on_ranks(
        lambda x, w, b, r: op(x, w, axis_name="tp", bias=b, residual=r, method=method),
        dp_tp_mesh(2, 4),
        (P("dp", None, "tp"), P("tp"), P(), OPS[op]),
        OPS[op],
        check_vma=check_vma,
    )
    values, wanted = operands(4), (0, 1, 2, 3)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layer(*v)), wanted))
    expected = jax.value_and_grad(lambda *v: weighted(plain(*v)), wanted)(*values)
    assert_equal(step(*values), expected)


@covering(
    op=OPS,
    method=METHODS,
    # Without vma, JAX divides gradients by P, which is exact for 4.
    ranks=[(2, "bfloat16", True), (3, "float16", True), (4, "float32", False)],
)
def test_a_kernel_may_be_stored_as_out_in(op, method, ranks):
    num_ranks, dtype, check_vma = ranks
    options = {"axis_name": "tp", "method": method, "rhs_transposed": True}
    layer = on_ranks(
        lambda x, w, b, r: op(x, w, bias=b, residual=r, **options),
        dp_tp_mesh(2, num_ranks),
        (P("dp", None, "tp"), P(None, "tp"), P(), OPS[op]),
        OPS[op],
        check_vma=check_vma,
    )
    x, w, b, residual = operands(num_ranks, dtype)
    values, wanted = (x, w.T, b, residual), (0, 1, 2, 3)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(layer(*v)), wanted))
    expected = jax.jit(
        jax.value_and_grad(lambda x, w, b, r: weighted(plain(x, w.T, b, r)), wanted)
    )(*(value.astype("float32") for value in values))
    found = step(*values)
    assert [g.dtype for g in found[1]] == [dtype] * 4
    expected = jax.tree.map(lambda e, f: np.asarray(e, f.dtype), expected, found)
    assert_equal(found, expected)
    if op is ub.matmul_reduce_scatter and method != "xla":
        assert " transpose(" not in compiled_text(step, *values)


@pytest.mark.parametrize("num_ranks", [1, 3, 16])
def test_any_number_of_ranks(num_ranks):
    layer = on_ranks(
        lambda x, w: ub.matmul_reduce_scatter(x, w, axis_name="tp"),
        tp_mesh(num_ranks),
        (P(None, None, "tp"), P("tp")),
        P(None, "tp"),
    )
    x, w, _, _ = operands(num_ranks)
    y, pull = jax.vjp(layer, x, w)
    expected, expected_pull = jax.vjp(jnp.matmul, x, w)
    assert_equal(y, expected)
    assert_equal(pull(y), expected_pull(y))


FULL = {
    # The wgrad reads the peers' dy in place, or what the dgrad gathered.
    "auto": {"all_gather_matmul": 1, "wgrad": 1},
    "ring_exchange": {"all_gather_matmul": 1, "wgrad": 1},
    "pipeline": {"all_gather_matmul": 1, "wgrad": 1},
    "external": {"all_gather_matmul": 1, "wgrad": 1},
}


def scattered_sums(**options):
    """Returns a GEMM+RS with bias and residual, of two ranks."""
    return on_ranks(
        lambda x, w, b, r: ub.matmul_reduce_scatter(
            x, w, axis_name="tp", bias=b, residual=r, **options
        ),
        tp_mesh(2),
        (P(None, None, "tp"), P("tp"), P(), P(None, "tp")),
        P(None, "tp"),
    )


@pytest.mark.parametrize(
    "method", ["auto", "ring_exchange", *nightly("pipeline", "external")]
)
def test_frozen_operands_skip_their_gemm_and_nothing_is_gathered_twice(method):
    x, w, b, residual = operands(2)
    layer = scattered_sums(method=method)

    def backward(*wanted):
        gradient = jax.jit(jax.grad(lambda *v: weighted(layer(*v)), wanted))
        text = compiled_text(gradient, x, w, b, residual)
        found = calls(text)
        found.subtract(["matmul_reduce_scatter"])
        return +found, collectives(text)

    assert backward(0, 1) == (FULL[method], {})
    assert backward(0) == ({"all_gather_matmul": 1}, {})
    alone = {"wgrad": 1} if method == "auto" else {"all_gather": 1, "wgrad": 1}
    assert backward(1) == (alone, {})
    # The gradient of a replicated bias is summed by JAX, over the ranks.
    assert backward(2) == ({}, {"all-reduce": 1})
    assert backward(3) == ({}, {})


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bfloat16", None), ("float16", "float32")]
)
def test_results_and_gradients_have_their_dtypes(dtype, out_dtype):
    x, w, b, residual = operands(2, dtype)
    layer = scattered_sums(out_dtype=out_dtype)
    y, pull = jax.vjp(layer, x, w, b.astype("float32"), residual)
    assert y.dtype == (out_dtype or dtype)
    assert [g.dtype for g in pull(y)] == [dtype, dtype, "float32", dtype]


def test_typed_backward_communicates_nothing():
    x, w, _, _ = operands(4)
    layer = on_ranks(
        lambda x, w: ub.matmul_all_reduce(x, w, axis_name="tp"),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp")),
        P(),
    )
    step = jax.jit(jax.value_and_grad(lambda x, w: weighted(layer(x, w)), (0, 1)))
    text = compiled_text(step, x, w)
    assert calls(text) == {"matmul_all_reduce": 1, "matmul": 1, "wgrad": 1}
    assert not collectives(text)


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("check_vma", [True, False])
def test_frozen_operands_of_an_all_reduce_skip_their_gemm(wanted, check_vma):
    x, w, _, _ = operands(4)
    layer = on_ranks(
        lambda x, w: ub.matmul_all_reduce(x, w, axis_name="tp"),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp")),
        P(),
        check_vma=check_vma,
    )
    step = jax.jit(jax.grad(lambda x, w: weighted(layer(x, w)), wanted))
    found = calls(compiled_text(step, x, w))
    assert found["matmul"] == (wanted == 0)
    assert found["wgrad"] == (wanted == 1)


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_addend_that_differs_between_ranks_is_refused(name):
    x, w, b, residual = operands(4)
    spec = P("tp") if name == "bias" else P(None, None, "tp")
    addend = jnp.tile(b, 4) if name == "bias" else jnp.tile(residual, 4)
    layer = on_ranks(
        lambda x, w, a: ub.matmul_all_reduce(x, w, axis_name="tp", **{name: a}),
        tp_mesh(4),
        (P(None, None, "tp"), P("tp"), spec),
        P(),
    )
    message = rf"matmul_all_reduce: {name} varies over \('tp',\).*once, after"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        layer(x, w, addend)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_and_its_gradient_are_exact(check_vma):
    x = small_integers(0, (4, 3, 5))
    function = on_ranks(
        lambda x: ub.all_reduce(x, axis_name="tp"),
        tp_mesh(4),
        P("tp"),
        P(),
        check_vma=check_vma,
    )
    step = jax.jit(jax.value_and_grad(lambda x: weighted(function(x))))
    expected = jax.value_and_grad(lambda x: weighted(x.sum(0, keepdims=True)))(x)
    assert_equal(step(x), expected)


@covering(num_ranks=[1, 2, 4], check_vma=[True, False])
def test_all_reduce_with_addends_and_its_gradients_are_exact(num_ranks, check_vma):
    x = small_integers(0, (4, 3 * num_ranks, 5), "bfloat16")
    bias = small_integers(1, (5,))
    residual = small_integers(2, (4, 3, 5), "bfloat16")

    def summed(x, bias, residual):
        x = x.astype("float32").reshape(4, num_ranks, 3, 5).sum(1)
        y = x + bias + residual.astype("float32")
        return y.astype("bfloat16")

    function = on_ranks(
        lambda x, bias, residual: ub.all_reduce(
            x, axis_name="tp", bias=bias, residual=residual
        ),
        dp_tp_mesh(2, num_ranks),
        (P("dp", "tp"), P(), P("dp")),
        P("dp"),
        check_vma=check_vma,
    )
    values, wanted = (x, bias, residual), (0, 1, 2)
    step = jax.jit(jax.value_and_grad(lambda *v: weighted(function(*v)), wanted))
    expected = jax.value_and_grad(lambda *v: weighted(summed(*v)), wanted)(*values)
    found = step(*values)
    assert [g.dtype for g in found[1]] == ["bfloat16", "float32", "bfloat16"]
    assert_equal(found, expected)


@pytest.mark.parametrize("addends", [("bias",), ("residual",), ("bias", "residual")])
def test_gradients_of_all_reduce_equal_those_of_its_reference(addends):
    x, bias = small_integers(0, (4, 5)), small_integers(1, (5,))
    options = {"bias": bias, "residual": small_integers(2, (1, 5))}
    options = {name: options[name] for name in addends}

    def reference(x, **options):
        y = jax.lax.psum(x, "tp")
        return sum((options[name] for name in addends), y)

    def pulled(function):
        run = on_ranks(function, tp_mesh(4), (P("tp"), P()), P())
        y, pull = jax.vjp(run, x, options)
        return y, pull(small_integers(3, y.shape))

    found = pulled(lambda x, given: ub.all_reduce(x, axis_name="tp", **given))
    assert_equal(found, pulled(lambda x, given: reference(x, **given)))


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_addend_of_all_reduce_that_differs_between_ranks_is_refused(name):
    x = small_integers(0, (4, 5))
    addend = small_integers(1, (20,) if name == "bias" else (4, 5))
    function = on_ranks(
        lambda x, a: ub.all_reduce(x, axis_name="tp", **{name: a}),
        tp_mesh(4),
        (P("tp"), P("tp")),
        P(),
    )
    message = rf"all_reduce: {name} varies over \('tp',\).*once, after"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        function(x, addend)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_inside_a_loss_on_the_ranks(check_vma):
    x = small_integers(0, (4, 6))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(ub.all_reduce(x, axis_name="tp") ** 2))(x)

    def native(x):
        return jax.grad(lambda x: jnp.sum(jax.lax.psum(x, "tp") ** 2))(x)

    found, expected = (
        on_ranks(function, tp_mesh(4), P("tp"), P("tp"), check_vma=check_vma)(x)
        for function in (gradient, native)
    )
    assert_equal(found, expected)


def test_all_reduce_of_a_replicated_value_counts_every_rank():
    function = on_ranks(
        lambda x: ub.all_reduce(x, axis_name="tp"), tp_mesh(4), P(), P()
    )
    x = small_integers(0, (3,))
    value, pull = jax.vjp(function, x)
    assert_equal(value, 4 * x)
    assert_equal(pull(x), (4 * x,))
