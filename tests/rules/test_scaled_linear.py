"""Linear layers with FP8 operands: values and gradients against the wide product."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operands import assert_equal, normal
from programs import calls, compiled_text, on_ranks, tp_mesh
from scaled_operands import (
    COLUMNS,
    MODES,
    RECIPES,
    ROWS,
    integers,
    linear,
    on_tp,
    operands,
    plain,
    quantized,
    value_and_gradients,
)

import jax_ub as ub

COLUMN, ROW, SUM = ("column", True), ("row", True), ("row", False)
CURRENT = RECIPES["current"]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def assert_exact(function, values, wanted=plain):
    """Asserts that results and gradients are f32 sums, rounded once to their dtypes."""
    wide = (value.astype("float32") for value in values)
    expected = value_and_gradients(wanted, *wide)
    found = value_and_gradients(function, *values)
    assert [g.dtype for g in found[1]] == [value.dtype for value in values]
    rounded = jax.tree.map(lambda f, e: e.astype(f.dtype), found, expected)
    jax.tree.map(assert_equal, found, rounded)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_exact(mode, recipe):
    function = on_tp(mode, linear(mode, RECIPES[recipe]))
    assert_exact(function, operands())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_ranks(mode, num_ranks):
    function = on_tp(mode, linear(mode, CURRENT), num_ranks)
    assert_exact(function, operands("float32"))


@pytest.mark.parametrize("method", ["direct", "ring_exchange", "external", "xla"])
@pytest.mark.parametrize(
    ("mode", "recipe"), [(ROW, "current"), (ROW, "block"), (SUM, "delayed")]
)
def test_row_parallel_layers_overlap_by_every_method(mode, recipe, method):
    layer = on_tp(mode, linear(mode, RECIPES[recipe], method=method), 2)
    values = operands()
    assert_exact(layer, values)
    found = calls(compiled_text(layer, *values))
    op = "matmul_reduce_scatter" if mode is ROW else "matmul_all_reduce"
    assert found == ({} if method == "xla" else {op: 1})


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_map_without_vma_types(mode):
    layer = on_tp(mode, linear(mode, CURRENT), check_vma=False)
    x, w, b = operands()
    assert_equal(layer(x, w, b), plain(x, w, b).astype("bfloat16"))
    if mode in (COLUMN, ROW):
        assert_exact(layer, (x, w, b))


@pytest.mark.parametrize("recipe", ["current", "block", "row"])
@pytest.mark.parametrize("mode", [COLUMN, ROW])
def test_a_kernel_may_be_stored_as_out_in(mode, recipe):
    layer = linear(mode, RECIPES[recipe], rhs_transposed=True)
    flipped = {COLUMN: (ROWS, ROWS, P("tp")), ROW: (COLUMNS, COLUMNS, P())}[mode]
    out_specs = {COLUMN: COLUMNS, ROW: ROWS}[mode]
    x, w, b = operands()
    function = on_ranks(layer, tp_mesh(4), flipped, out_specs)
    assert_exact(function, (x, w.T, b), lambda x, w, b: plain(x, w.T, b))


@pytest.mark.parametrize("op", [ub.matmul_reduce_scatter, ub.matmul_all_reduce])
def test_bias_and_residual_are_added_before_the_only_rounding(op):
    def layer(x, w, bias, residual):
        x, w = quantized(CURRENT, x, w)
        return op(x, w, axis_name="tp", bias=bias, residual=residual)

    out = ROWS if op is ub.matmul_reduce_scatter else P()
    function = on_ranks(layer, tp_mesh(2), (COLUMNS, ROWS, P(), out), out)
    # 1.5 is lost where the product, up to 2^13, is rounded before the sum.
    values = (*operands(), jnp.full((8, 8), 1.5, "bfloat16"))
    assert_exact(function, values, lambda x, w, b, r: plain(x, w, b) + r)


@pytest.mark.parametrize("recipe", RECIPES)
def test_several_kernels_share_one_gather_of_bytes(recipe):
    def layer(x, w1, w2, b1, b2):
        x, *ws = quantized(RECIPES[recipe], x, w1, w2)
        options = {"axis_name": "tp", "bias": (b1, b2), "out_dtype": jnp.float32}
        ys, gathered = ub.all_gather_matmul(
            x, tuple(ws), return_gathered=True, **options
        )
        dequantized = gathered.dequantize(jnp.float32)
        assert gathered.source is None
        return jnp.concatenate(ys, 1), dequantized + 0 * jax.lax.axis_index("tp")

    specs = (ROWS, COLUMNS, COLUMNS, P("tp"), P("tp"))
    function = on_ranks(layer, tp_mesh(4), specs, (COLUMNS, ROWS))
    x, w, b = operands()
    values = x, w, integers(3, (128, 4)), b, integers(4, (4,))

    def wanted(x, w1, w2, b1, b2):
        y1, y2 = plain(x, w1, b1), plain(x, w2, b2)
        parts = [jnp.split(y, 4, axis=1) for y in (y1, y2)]
        return jnp.concatenate(
            [y for pair in zip(*parts, strict=True) for y in pair], 1
        )

    assert_exact(lambda *v: function(*v)[0], values, wanted)
    gathered = function(*values)[1]
    assert_equal(gathered, jnp.concatenate([x.astype("float32")] * 4))
    text = compiled_text(function, *values)
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(lines) == (2 if recipe in ("block", "row") else 1)
    assert sum("u8[" in line.split("all-gather")[0] for line in lines) == (
        2 if recipe == "block" else 1
    )


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_frozen_operands_have_no_gradient(operand):
    values = operands()
    layer = on_tp(COLUMN, linear(COLUMN, CURRENT))

    def only(value):
        return layer(*values[:operand], value, *values[operand + 1 :])

    _, (found,) = value_and_gradients(only, values[operand])
    assert_equal(found, value_and_gradients(layer, *values)[1][operand])


def test_scales_that_are_no_powers_of_two_multiply_the_f32_sum():
    x, w = normal(0, (16, 256)), normal(1, (256, 8))
    recipe = ub.fp8.Float8CurrentScaling()
    a, b = quantized(recipe, x, w, axis_name=None)
    found = ub.linear(a, b)
    wide_a, wide_b = (formulas.dequantize(q.values, q.scales) for q in (a, b))
    bound = (256 + 4) * 2.0**-24 * (np.abs(wide_a) @ np.abs(wide_b))
    assert np.all(np.abs(wide_a @ wide_b - found) <= bound)
    # The rounding of both operands: 0.037 for e4m3, in the Frobenius norm.
    assert np.linalg.norm(found - x @ w) / np.linalg.norm(x @ w) < 1.2 * 0.037


@pytest.mark.parametrize("pair", [(E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("scaling", ["tensor", "mixed"])
def test_operands_of_two_formats_without_sources(pair, scaling):
    numbers = np.random.default_rng(0).integers(-4, 5, (8, 64))
    x, w = (jnp.asarray(a, t) for a, t in zip((numbers, numbers.T), pair, strict=True))
    x_scale = jnp.full((8, 2), 0.5, jnp.float8_e8m0fnu)
    x_scale = x_scale if scaling == "mixed" else jnp.float32(0.5)
    a, b = ub.ScaledArray(x, x_scale), ub.ScaledArray(w, jnp.full((1, 1), 4.0))
    y = ub.linear(a, b)
    assert y.dtype == jnp.bfloat16
    assert_equal(y, jnp.asarray(2.0 * numbers @ numbers.T, "bfloat16"))
    assert ub.linear(a, b, method="xla").dtype == jnp.bfloat16


def test_a_vector_of_features():
    x, w, b = operands()
    for scale in (jnp.float32(2), jnp.full((1,), 2.0), None):
        a, kernel = quantized(RECIPES["block"], x[0], w, axis_name=None)
        if scale is not None:
            a = ub.ScaledArray((x[0] / 2).astype(E4M3), scale, x[0])
        y = ub.linear(a, kernel, b)
        assert_equal(y, plain(x[:1], w, b)[0].astype("bfloat16"))


def test_a_single_row_per_rank():
    x, w, _ = operands()

    def layer(x, w):
        a, kernel = quantized(RECIPES["row"], x, w)
        return ub.all_gather_matmul(a, kernel, axis_name="tp", out_dtype="float32")

    function = on_ranks(layer, tp_mesh(4), (ROWS, COLUMNS), COLUMNS)
    assert_exact(function, (x[:4], w), lambda x, w: plain(x, w, jnp.zeros(8)))


@pytest.mark.parametrize("recipe", ["block", "row"])
def test_batch_axes_in_front_of_the_rows(recipe):
    x = integers(0, (2, 8, 128))
    _, w, b = operands()
    specs = (P(None, "tp"), COLUMNS, P("tp"))
    layer = linear(COLUMN, RECIPES[recipe])
    function = on_ranks(layer, tp_mesh(2), specs, P(None, None, "tp"))
    assert_exact(function, (x, w, b))


def test_the_kernel_gradient_keeps_the_precision_of_its_source():
    x, w, b = operands()
    layer = on_tp(ROW, linear(ROW, CURRENT))
    assert_exact(layer, (x, w.astype("float32"), b))


def test_main_grad_accumulates_and_the_kernel_has_no_gradient():
    def layer(x, w, main_grad):
        x, w = quantized(CURRENT, x, w)
        options = {"main_grad": main_grad, "out_dtype": jnp.float32}
        return ub.matmul_reduce_scatter(x, w, axis_name="tp", **options)

    x, w, _ = operands()
    main_grad = integers(5, w.shape, "float32")
    function = on_ranks(layer, tp_mesh(2), (COLUMNS, ROWS, ROWS), ROWS)
    _, (dx, dw, accumulated) = value_and_gradients(function, x, w, main_grad)
    wide = (v.astype("float32") for v in (x, w))
    _, expected = value_and_gradients(lambda x, w: plain(x, w, 0.0), *wide)
    assert_equal(dx, expected[0].astype("bfloat16"))
    assert_equal(accumulated, main_grad + expected[1])
    assert not np.any(dw)
