import functools

import jax
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import (
    DTYPES,
    RANK_COUNTS,
    assert_close,
    assert_equal,
    normal,
    small_integers,
)
from programs import (
    calls,
    collectives,
    compiled_text,
    copies,
    execution,
    on_ranks,
    own_copy,
    tp_mesh,
    with_methods,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.matmuls import all_gather_matmul

METHODS = (Method.DIRECT, Method.RING_EXCHANGE, Method.PIPELINE, Method.EXTERNAL)
ROWS, COLUMNS, FEATURES = P(None, "tp"), P(None, "tp"), P(None, None, "tp")


def product(x, ws, biases, *, num_ranks, method, out_dtype, **options):
    return all_gather_matmul(
        execution(method, num_ranks),
        x,
        ws,
        biases,
        out_dtype=out_dtype,
        **options,
    )


def two_ways(x, ws, transposed, biases, **where):
    """Calls the op in two ways: with a bias and the gathered x, and with neither."""
    plain, gathered = product(
        x, ws, biases, return_gathered=True, out_dtype=x.dtype, **where
    )
    others, nothing = product(
        x, transposed, None, rhs_transposed=True, out_dtype="float32", **where
    )
    assert nothing is None
    return plain, gathered, others


def operands(make, num_ranks, dtype):
    x = make(0, (2, 3 * num_ranks, 13), dtype)
    ws = make(1, (13, 5 * num_ranks), dtype), make(2, (13, 7 * num_ranks), dtype)
    biases = make(3, (5 * num_ranks,), "float32"), make(4, (7 * num_ranks,), dtype)
    return x, ws, tuple(w.T for w in ws), biases


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=num_ranks), METHODS)
    specs = (ROWS, COLUMNS, P("tp"), P("tp"))
    run = on_ranks(function, tp_mesh(num_ranks), specs, FEATURES)
    expected, actual = run(*operands(small_integers, num_ranks, dtype))
    for results in actual.values():
        assert_equal(results, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_close_on_normal_values(dtype):
    function = with_methods(functools.partial(two_ways, num_ranks=4), METHODS)
    specs = (ROWS, COLUMNS, P("tp"), P("tp"))
    run = on_ranks(function, tp_mesh(4), specs, FEATURES)
    expected, actual = run(*operands(normal, 4, dtype))
    for plain, gathered, others in actual.values():
        assert_equal(gathered, expected[1])
        for y, wanted in zip(plain + others, expected[0] + expected[2], strict=True):
            assert_close(y, wanted, 13)


@pytest.mark.parametrize("method", METHODS)
def test_is_one_call_and_no_collective(method):
    x, ws, _, biases = operands(small_integers, 4, "float32")

    def function(x, ws, biases):
        where = {"num_ranks": 4, "method": method, "out_dtype": "float32"}
        return product(x, ws, biases, **where)[0]

    run = on_ranks(function, tp_mesh(4), (ROWS, COLUMNS, P("tp")), FEATURES)
    text = compiled_text(run, x, ws, biases)
    assert calls(text) == {"all_gather_matmul": 1}
    assert not collectives(text)


def scaled_and_added(x, ws, biases, residuals, **where):
    """Calls the op with bias and residual, and with the residual only."""
    options = {"scale": 0.5, "out_dtype": "float32", **where}
    return (
        product(x, ws, biases, residuals=residuals, return_gathered=True, **options),
        product(x, ws, None, residuals=residuals, **options)[0],
    )


def with_residuals(num_ranks, dtype):
    x, ws, _, biases = operands(small_integers, num_ranks, dtype)
    rows = (2, 3 * num_ranks)
    return x, ws, biases, tuple(small_integers(5, (*rows, w.shape[1])) for w in ws)


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_scaled_product_is_added_to_its_residual(num_ranks, dtype):
    function = functools.partial(scaled_and_added, num_ranks=num_ranks)
    specs = (ROWS, COLUMNS, P("tp"), FEATURES)
    out = (((FEATURES, FEATURES), P()), (FEATURES, FEATURES))
    run = on_ranks(
        with_methods(function, METHODS),
        tp_mesh(num_ranks),
        specs,
        (out, dict.fromkeys((m.value for m in METHODS), out)),
        check_vma=False,
    )
    expected, actual = run(*with_residuals(num_ranks, dtype))
    for results in actual.values():
        assert_equal(results, expected)


def test_scale_is_that_of_the_product_only():
    x, ws, biases, residuals = with_residuals(2, "float32")
    run = on_ranks(
        lambda *v: scaled_and_added(*v, num_ranks=2, method=Method.DIRECT)[0][0],
        tp_mesh(2),
        (ROWS, COLUMNS, P("tp"), FEATURES),
        FEATURES,
    )
    expected = tuple(
        (x @ w) / 2 + b + r for w, b, r in zip(ws, biases, residuals, strict=True)
    )
    assert_equal(run(x, ws, biases, residuals), expected)


@pytest.mark.parametrize("method", METHODS)
def test_residual_becomes_the_product_in_place(method):
    x, ws, _, residuals = with_residuals(2, "float32")

    def function(x, w, residual):
        where = {"num_ranks": 2, "method": method, "out_dtype": "float32"}
        return product(x, (w,), None, residuals=(residual,), **where)[0][0]

    mesh = tp_mesh(2)
    run = jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(ROWS, COLUMNS, FEATURES), out_specs=FEATURES
        ),
        donate_argnums=2,
    )
    residual = own_copy(residuals[0], mesh, FEATURES)
    assert copies(compiled_text(run, x, ws[0], residual), "f32[2,6,5]") == 0
    pointers = [s.data.unsafe_buffer_pointer() for s in residual.addressable_shards]
    result = run(x, ws[0], residual)
    assert_equal(result, x @ ws[0] + residuals[0])
    assert pointers == [
        s.data.unsafe_buffer_pointer() for s in result.addressable_shards
    ]


def test_vmap_folds_the_residual_with_the_rows():
    x, ws, _, residuals = with_residuals(2, "float32")

    def function(x, w, residual):
        where = {"num_ranks": 2, "method": Method.DIRECT, "out_dtype": "float32"}
        return product(x, (w,), None, residuals=(residual,), **where)[0][0]

    run = on_ranks(
        jax.vmap(function, in_axes=(0, None, 0)),
        tp_mesh(2),
        (ROWS, COLUMNS, FEATURES),
        FEATURES,
    )
    assert_equal(run(x, ws[0], residuals[0]), x @ ws[0] + residuals[0])
    assert calls(compiled_text(run, x, ws[0], residuals[0])) == {"all_gather_matmul": 1}
