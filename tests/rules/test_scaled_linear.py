"""Linear layers with FP8 operands: values and gradients against the wide product."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering, nightly
from jax.sharding import PartitionSpec as P
from layouts import visible
from operands import assert_equal, normal
from programs import (
    by_method,
    call_lines,
    calls,
    compiled_text,
    on_ranks,
    tp_mesh,
)
from scaled_operands import (
    COLUMN,
    COLUMNS,
    LOCAL,
    METHODS,
    MODES,
    RECIPES,
    ROW,
    ROWS,
    SPECS,
    SUM,
    assert_exact,
    check_main_grad,
    integers,
    linear,
    on_tp,
    operands,
    plain,
    quantized,
    value_and_gradients,
)

import jax_ub as ub

CURRENT = RECIPES["current"]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@covering(mode=MODES, recipe=RECIPES)
def test_values_and_gradients_are_exact(mode, recipe):
    function = on_tp(mode, linear(mode, RECIPES[recipe]))
    assert_exact(function, operands())


@covering(mode=[COLUMN, SUM, *nightly(ROW, ("column", False), LOCAL)], num_ranks=[1, 2])
def test_any_number_of_ranks(mode, num_ranks):
    function = on_tp(mode, linear(mode, CURRENT), num_ranks)
    assert_exact(function, operands("float32"))


@covering(mode=[COLUMN, ROW, SUM], recipe=RECIPES, method=METHODS)
def test_layers_overlap_by_every_method(mode, recipe, method):
    layer = on_tp(mode, linear(mode, RECIPES[recipe], method=method), 2)
    ub.fallbacks(clear=True)
    text = assert_exact(layer, operands())
    assert not ub.fallbacks(clear=True)
    op, dgrad = {
        COLUMN: ("all_gather_matmul", "matmul_reduce_scatter"),
        ROW: ("matmul_reduce_scatter", "all_gather_matmul"),
        SUM: ("matmul_all_reduce", "matmul"),
    }[mode]
    # The gradient of a column layer's kernel reads x in place only with "direct" and
    # one scale per tensor.
    in_place = method == "direct" and recipe in ("current", "delayed")
    gathers = ["all_gather"] if mode is COLUMN and not in_place else []
    ops = [] if method == "xla" else [op, dgrad, "wgrad", *gathers]
    assert calls(text) == dict.fromkeys(ops, 1)
    if method == "xla":
        return
    # FP8 arrays and their scales are operands of the call.
    target = f'custom_call_target="jax_ub${op}"'
    (line,) = (line for line in call_lines(text) if target in line)
    assert line.count("f8e4m3fn[") == 2
    scales = {"block": "f8e8m0fnu[", "row": "f32["}.get(recipe, "f32[1]")
    assert line.count(scales) == 2


@pytest.mark.parametrize("mode", [COLUMN, *nightly(ROW, SUM)])
def test_gradients_multiply_the_fp8_values(mode):
    def gradients(*values):
        return value_and_gradients(layer, *values)[1]

    layer = on_tp(mode, linear(mode, CURRENT), 2)
    text = compiled_text(jax.jit(gradients), *operands())
    assert [line.count("f8e4m3fn[") for line in call_lines(text)] == [1, 1]


def test_a_kernel_stays_fp8_if_only_x_is_dequantized():
    # The wgrad of a column layer contracts the rows of x, which have different scales.
    def layer(x, w, b):
        x = ub.quantize(x, RECIPES["row"])
        w = ub.quantize(w, CURRENT, role="kernel")
        return ub.linear(x, w, b, parallel="column", axis_name="tp")

    text = assert_exact(on_tp(COLUMN, layer, 2), operands())
    assert num_fp8_arrays(text) == {
        "all_gather_matmul": 2,
        "all_gather": 2,
        "matmul_reduce_scatter": 1,
        "wgrad": 0,
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_scale_may_be_agreed_on_by_ranks_with_one_row(check_vma):
    # The shape of the scale is that of a scale per row. Only `check_vma` tells that it
    # is equal on all ranks, so that the wgrad can read the FP8 rows in place.
    layer = on_tp(COLUMN, linear(COLUMN, CURRENT), 2, check_vma=check_vma)
    x, *others = operands()
    found = num_fp8_arrays(assert_exact(layer, (x[:2], *others)))
    assert found["wgrad"] == (1 if check_vma else 0)
    assert found["matmul_reduce_scatter"] == 1


def num_fp8_arrays(text):
    """Returns the number of FP8 operands and results by custom call."""
    return {
        name: line.count("f8e4m3fn[")
        for line in call_lines(text)
        for name in calls(line)
    }


def test_the_gradients_of_a_name_may_be_bulk():
    mesh = tp_mesh(2)
    layer = linear(COLUMN, CURRENT, **by_method("bulk", mesh))
    function = on_tp(COLUMN, layer, 2)
    assert_exact(function, operands())
    gradients = jax.jit(lambda *values: value_and_gradients(function, *values))
    found = calls(compiled_text(gradients, *operands()))
    assert found["bulk_all_gather"] == found["bulk_reduce_scatter"] == 1


def test_scales_multiply_the_f32_sums_of_gradients():
    x, w, dy = normal(0, (64, 16)), normal(1, (16, 8)), normal(2, (64, 8))
    x, dy = x.astype("bfloat16"), dy.astype("bfloat16")
    recipe = ub.fp8.Float8CurrentScaling()

    def loss(main_grad):
        a, kernel = quantized(recipe, x, w, axis_name=None)
        y = ub.linear(a, kernel, main_grad=main_grad)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

    found = jax.jit(jax.grad(loss))(jnp.zeros(w.shape, jnp.float32))
    a, _ = quantized(recipe, x, w, axis_name=None)
    wide_x, wide_dy = formulas.dequantize(a.values, a.scales), np.asarray(dy, float)
    bound = (64 + 4) * 2.0**-24 * (np.abs(wide_x.T) @ np.abs(wide_dy))
    assert np.all(np.abs(wide_x.T @ wide_dy - found) <= bound)


@covering(mode=[COLUMN, ROW, SUM], method=["direct", "ring_exchange"])
def test_ranks_with_amax_1_100_and_10000_agree_on_the_scale(mode, method):
    # Equal to one rank that has the whole tensors, up to the order of f32 sums.
    recipe = ub.fp8.Float8CurrentScaling()
    x, w, b = normal(0, (8, 256)), normal(1, (256, 8)), normal(2, (8,))
    magnitudes = jnp.repeat(jnp.asarray([1.0, 1e2, 1e4, 1.0]), 2)[:, None]
    if mode is COLUMN:
        x = x * magnitudes
    else:
        x = x * jnp.repeat(magnitudes.reshape(-1), 32)
        w = w * jnp.repeat(jnp.flip(magnitudes.reshape(-1)), 32)[:, None]
    found = on_tp(mode, linear(mode, recipe, method=method))(x, w, b)
    a, kernel = quantized(recipe, x, w, axis_name=None)
    wide_w = formulas.dequantize(kernel.values, kernel.scales)
    wide_x = formulas.dequantize(a.values, a.scales)
    bound = (256 + 8) * 2.0**-24 * (np.abs(wide_x) @ np.abs(wide_w) + np.abs(b))
    wanted = wide_x @ wide_w + np.asarray(b)
    for place, part in visible(found):
        assert np.all(np.abs(wanted[place] - np.asarray(part)) <= bound[place])


@covering(mode=[COLUMN, ROW, SUM], dtype=["float32", "bfloat16", "float16"])
def test_the_result_has_the_dtype_of_the_source(mode, dtype):
    assert_exact(on_tp(mode, linear(mode, CURRENT), 2), operands(dtype))


@covering(
    dtype=["float32", "bfloat16", "float16"],
    formats=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
)
def test_dgrad_add_and_wgrad_accumulate_multiply_fp8(dtype, formats):
    dy, w, x = (integers(i, shape) for i, shape in enumerate([(8, 32)] * 3))
    w = integers(1, (16, 32))
    residual = integers(4, (8, 16), dtype)
    scales = jnp.float32(0.5), jnp.full((1, 1), 4.0)

    def scaled(values, dtype, scale):
        # Small integers are exact in both formats.
        return ub.ScaledArray(jnp.sign(values).astype(dtype), scale)

    a, b = (scaled(v, t, s) for v, t, s in zip((dy, w), formats, scales, strict=True))
    wide = jnp.sign(dy.astype("float32")), jnp.sign(w.astype("float32"))
    expected = residual.astype("float32") + 2 * wide[0] @ wide[1].T
    assert_equal(ub.dgrad_add(a, b, residual), expected.astype(dtype))
    found = ub.dgrad_add(ub.ScaledArray(a.values[0], a.scales), b, residual[0])
    assert_equal(found, expected[0].astype(dtype))
    main_grad = integers(5, (32, 16), dtype)
    c = scaled(x[:, :16], formats[1], scales[1])
    expected = main_grad.astype("float32") + 2 * wide[0].T @ jnp.sign(
        x[:, :16].astype("float32")
    )
    assert_equal(ub.wgrad_accumulate(a, c, main_grad), expected.astype(dtype))
    text = compiled_text(jax.jit(ub.wgrad_accumulate), a, c, main_grad)
    assert calls(text) == {"wgrad": 1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_dgrad_add_and_wgrad_accumulate_take_all_recipes(recipe):
    recipe = RECIPES[recipe]
    state = ub.fp8.init_state(recipe) or None

    def quantize(array, role):
        return ub.quantize(array, recipe, role=role, state=state)

    def dgrad_add(dy, w, residual):
        dy, w = quantize(dy, "output_grad"), quantize(w, "kernel")
        return ub.dgrad_add(dy, w, residual)

    def wgrad_accumulate(x, dy, main_grad):
        x, dy = quantize(x, "input"), quantize(dy, "output_grad")
        return ub.wgrad_accumulate(x, dy, main_grad)

    x, dy, w = integers(0, (8, 64)), integers(1, (8, 32)), integers(2, (64, 32))
    for op, values, wanted in (
        (dgrad_add, (dy, w, x), lambda dy, w, residual: residual + dy @ w.T),
        (dgrad_add, (dy[0], w, x[0]), lambda dy, w, residual: residual + dy @ w.T),
        (wgrad_accumulate, (x, dy, w), lambda x, dy, main_grad: main_grad + x.T @ dy),
    ):
        assert_exact(op, values, wanted)


def test_gradients_of_dgrad_add_arrive_in_the_sources():
    dy, w = integers(0, (8, 32)), integers(1, (16, 32))
    residual = jnp.zeros((8, 16))

    def loss(dy, w, residual, is_fp8):
        if is_fp8:
            dy, w = (ub.quantize(a, CURRENT) for a in (dy, w))
        return jnp.sum(ub.dgrad_add(dy, w, residual))

    for_fp8, for_wide = (
        jax.grad(loss, (0, 1, 2))(dy, w, residual, is_fp8) for is_fp8 in (True, False)
    )
    jax.tree.map(assert_equal, for_fp8, for_wide)


def test_operands_without_a_source_need_none_for_the_gradient_of_an_addend():
    dy, x, w = (
        integers(i, shape) for i, shape in enumerate([(8, 32)] * 2 + [(16, 32)])
    )
    residual, main_grad = jnp.zeros((8, 16)), jnp.zeros((32, 32))

    def bare(a):
        return ub.ScaledArray(a.astype(E4M3), jnp.float32(1))

    def dgrad_add(dy, residual):
        return jnp.sum(ub.dgrad_add(bare(dy), ub.quantize(w, CURRENT), residual))

    def wgrad_accumulate(x, main_grad):
        return jnp.sum(ub.wgrad_accumulate(bare(x), bare(dy), main_grad))

    for loss, operand, addend in (
        (dgrad_add, dy, residual),
        (wgrad_accumulate, x, main_grad),
    ):
        for disabled in (False, True):
            with jax.disable_jit(disabled):
                assert_equal(jax.grad(loss, 1)(operand, addend), jnp.ones_like(addend))
        name = "dy" if loss is dgrad_add else "x"
        text = f"{loss.__name__}: {name} is FP8 and has no source to receive a gradient"
        with pytest.raises(ub.errors.UnsupportedOverlapError, match=text):
            jax.grad(loss)(operand, addend)


@pytest.mark.parametrize("mode", [COLUMN, SUM, *nightly(ROW, ("column", False), LOCAL)])
def test_a_shard_map_without_vma_types(mode):
    layer = on_tp(mode, linear(mode, CURRENT), check_vma=False)
    x, w, b = operands()
    assert_equal(layer(x, w, b), plain(x, w, b).astype("bfloat16"))
    if mode in (COLUMN, ROW):
        assert_exact(layer, (x, w, b))


@covering(mode=[COLUMN, ROW], recipe=["current", "block", *nightly("row")])
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


@pytest.mark.parametrize("recipe", ["block", *nightly("current", "delayed", "row")])
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
    assert " all-gather(" not in text
    assert calls(text) == {"all_gather_matmul": 1}


@pytest.mark.parametrize("operand", [0, 1, *nightly(2)])
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


@covering(mode=[COLUMN, ROW, SUM], method=METHODS)
def test_row_scales_of_any_size_multiply_the_f32_sums(mode, method):
    random = np.random.default_rng(3)
    x, w = normal(0, (8, 256)), normal(1, (256, 8))
    num_ranks = 4
    # Each rank has other scales for its part of K, or for its rows and columns.
    shape = (8, 1) if mode is COLUMN else (8, num_ranks)
    x_scales, w_scales = (jnp.asarray(random.uniform(0.5, 2, shape)) for _ in range(2))

    def layer(x, w, x_scales, w_scales):
        x = ub.ScaledArray(x.astype(E4M3), x_scales.astype("float32"))
        w = ub.ScaledArray(w.astype(E4M3), w_scales.T.astype("float32"))
        options = {"axis_name": "tp", "method": method, "out_dtype": jnp.float32}
        op = {COLUMN: ub.all_gather_matmul, ROW: ub.matmul_reduce_scatter}
        return op.get(mode, ub.matmul_all_reduce)(x, w, **options)

    (x_spec, w_spec, _), out = SPECS[mode]
    scale_spec = ROWS if mode is COLUMN else COLUMNS
    specs = (x_spec, w_spec, scale_spec, scale_spec)
    function = on_ranks(layer, tp_mesh(num_ranks), specs, out)
    found = function(x, w, x_scales, w_scales)
    wide_x, wide_w = (np.asarray(a.astype(E4M3), np.float64) for a in (x, w))
    repeats = 256 // shape[1]
    wide_x = wide_x * np.repeat(np.asarray(x_scales, np.float32), repeats, 1)
    wide_w = wide_w * np.repeat(np.asarray(w_scales, np.float32), repeats, 1).T
    bound = (256 + 8) * 2.0**-24 * (np.abs(wide_x) @ np.abs(wide_w))
    for place, part in visible(found):
        error = np.abs((wide_x @ wide_w)[place] - np.asarray(part))
        assert np.all(error <= bound[place])


@covering(2, method=["direct", "xla"], scaling=["tensor", "row"], exponent=[112, -120])
def test_a_product_of_scales_is_exact_unless_it_leaves_the_range(
    method, scaling, exponent
):
    shapes = {"tensor": ((), ()), "row": ((8, 1), (1, 4))}[scaling]
    exponents = exponent, -5 - exponent
    x_scale, w_scale = (
        jnp.full(shape, 2.0**e, jnp.float32)
        for shape, e in zip(shapes, exponents, strict=True)
    )
    x = jnp.full((8, 64), 2.0 ** (9 if exponent > 0 else -9), E5M2)
    w = jnp.full((64, 4), 2.0 ** (8 if exponent > 0 else -9), E4M3)

    def layer(x, w):
        x, w = ub.ScaledArray(x, x_scale), ub.ScaledArray(w, w_scale)
        options = {"axis_name": "tp", "method": method, "out_dtype": jnp.float32}
        return ub.matmul_all_reduce(x, w, **options)

    y = on_ranks(layer, tp_mesh(2), (COLUMNS, ROWS), P())(x, w)
    wanted = 2.0 ** (17 if exponent > 0 else -18) * 64 * 2.0**-5
    assert_equal(y, np.full((8, 4), wanted, np.float32))


@covering(pair=[(E4M3, E5M2), (E5M2, E4M3)], scaling=["tensor", "mixed"])
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


@pytest.mark.parametrize("recipe", ["block", *nightly("row")])
def test_batch_axes_in_front_of_the_rows(recipe):
    x = integers(0, (2, 8, 128))
    _, w, b = operands()
    specs = (P(None, "tp"), COLUMNS, P("tp"))
    layer = linear(COLUMN, RECIPES[recipe])
    function = on_ranks(layer, tp_mesh(2), specs, P(None, None, "tp"))
    assert_exact(function, (x, w, b))


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_gradients_of_the_largest_f16_numbers_are_finite(recipe):
    largest = float(jnp.finfo("float16").max)
    x = jnp.zeros((8, 64), "float16").at[0, 0].set(largest)
    w = jnp.ones((64, 32), "float16") * 2.0**-10

    @jax.jit
    @jax.grad
    def gradient(w):
        y = ub.linear(*quantized(RECIPES[recipe], x, w, axis_name=None))
        return jnp.sum(y) * 2.0**-6

    np.testing.assert_array_equal(gradient(w)[0], np.float16(largest * 2.0**-6))


def test_the_kernel_gradient_keeps_the_precision_of_its_source():
    x, w, b = operands()
    layer = on_tp(ROW, linear(ROW, CURRENT))
    assert_exact(layer, (x, w.astype("float32"), b))


def test_main_grad_accumulates_and_the_kernel_has_no_gradient():
    def layer(x, w, main_grad):
        x, w = quantized(CURRENT, x, w)
        options = {"main_grad": main_grad, "out_dtype": jnp.float32}
        return ub.matmul_reduce_scatter(x, w, axis_name="tp", **options)

    check_main_grad(layer)
