"""FP8 kernels whose scales differ: between ranks, or between kernels of a call."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from layouts import visible
from operands import assert_equal, normal
from programs import by_method, call_lines, compiled_text, on_ranks, tp_mesh
from scaled_operands import (
    COLUMN,
    COLUMNS,
    METHODS,
    RECIPES,
    ROWS,
    SPECS,
    assert_exact,
    integers,
    plain,
    quantized,
)
from scaled_operands import operands as exact_operands

import jax_ub as ub

RECIPE = ub.fp8.Float8CurrentScaling()
NUM_RANKS, NUM_FEATURES = 3, 4  # features of each rank
REPLICATED = ("column", False)


def layer(mode, is_layer_quantized, **options):
    """Returns a function (x, w) that quantizes each rank's kernel on its own."""

    def call(x, w):
        w = ub.quantize(w, RECIPE, role="kernel")
        if is_layer_quantized:
            options["fp8"] = RECIPE
        else:
            x = ub.quantize(x, RECIPE, axis_name="tp" if mode is COLUMN else None)
        column = {"parallel": "column", "sequence_parallel": mode is COLUMN}
        return ub.linear(x, w, axis_name="tp", **column, **options)

    return call


def gradient_of_x(function, x, w, dy):
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(function(x, w) * dy)))
    return gradient(x), compiled_text(gradient, x)


def operands():
    """Returns x, w and dy. The kernels of the ranks differ 10,000-fold."""
    size = NUM_RANKS * NUM_FEATURES
    magnitudes = np.repeat(np.float32([1, 100, 10_000]), NUM_FEATURES)
    w = normal(1, (64, size)) * magnitudes
    return normal(0, (2 * NUM_RANKS, 64)), w, normal(2, (2 * NUM_RANKS, size))


def assert_gradient(dx, w, dy, quantizes_dy):
    """Compares with f64 on the dequantized kernels of all ranks."""

    def wide(array, role):
        q = ub.quantize(array, RECIPE, role=role)
        return formulas.dequantize(q.values, q.scales)

    kernels = np.split(w, NUM_RANKS, 1)
    w = np.concatenate([wide(kernel, "kernel") for kernel in kernels], 1)
    dy = wide(dy, "output_grad") if quantizes_dy else dy.astype(np.float64)
    wanted, bound = dy @ w.T, 20 * 2.0**-24 * (np.abs(dy) @ np.abs(w).T)
    for place, part in visible(dx):
        assert np.all(np.abs(wanted[place] - np.asarray(part)) <= bound[place])


@covering(method=[*METHODS, "bulk"], is_layer_quantized=[True, False])
def test_the_gradient_of_x_has_the_scale_of_each_rank(method, is_layer_quantized):
    mesh = tp_mesh(NUM_RANKS)
    call = layer(COLUMN, is_layer_quantized, **by_method(method, mesh))
    function = on_ranks(call, mesh, (ROWS, COLUMNS), COLUMNS)
    x, w, dy = operands()
    dx, _ = gradient_of_x(function, x, w, dy)
    assert_gradient(dx, w, dy, is_layer_quantized)


@covering(mode=[COLUMN, REPLICATED], check_vma=[True, False])
def test_kernels_with_different_scales_stay_fp8(mode, check_vma):
    (x_spec, *_), _ = SPECS[mode]
    call = layer(mode, False)
    function = on_ranks(
        call, tp_mesh(NUM_RANKS), (x_spec, COLUMNS), COLUMNS, check_vma=check_vma
    )
    x, w, dy = operands()
    dx, text = gradient_of_x(function, x, w, dy)
    (line,) = (line for line in call_lines(text) if "f8e4m3fn[" in line)
    assert line.count("f8e4m3fn[") == 1
    assert_gradient(dx, w, dy, False)


@pytest.mark.parametrize("axis_name", ["tp", None])
def test_only_scales_that_differ_are_scales_of_the_ranks(axis_name):
    def call(x, w):
        x = ub.quantize(x, RECIPE, axis_name="tp")
        w = ub.quantize(w, RECIPE, role="kernel", axis_name=axis_name)
        return ub.linear(x, w, parallel="column", axis_name="tp")

    function = on_ranks(call, tp_mesh(NUM_RANKS), (ROWS, COLUMNS), COLUMNS)
    _, text = gradient_of_x(function, *operands())
    (line,) = (line for line in call_lines(text) if "f8e4m3fn[" in line)
    assert ("has_row_scales = 1" in line) == (axis_name is None)


def both_products(x, w1, w2):
    return jnp.stack([plain(x, w, 0.0) for w in (w1, w2)])


@covering(num_ranks=[1, 2], is_layer_quantized=[True, False], method=[*METHODS, "bulk"])
def test_the_gradient_of_x_has_the_scale_of_each_kernel(
    num_ranks, is_layer_quantized, method
):
    # The ranks have agreed on the scales, so that each kernel has one for all ranks.
    recipe, mesh = RECIPES["current"], tp_mesh(num_ranks)
    options = {"axis_name": "tp", **by_method(method, mesh)}

    def layer(x, w1, w2):
        q, *ws = quantized(recipe, x, w1, w2)
        if is_layer_quantized:
            q, options["fp8"] = x, recipe
        return jnp.stack(ub.all_gather_matmul(q, tuple(ws), **options))

    specs = ROWS, COLUMNS, COLUMNS
    function = on_ranks(layer, mesh, specs, P(None, None, "tp"))
    x, w, _ = exact_operands()
    assert_exact(function, (x, w, 16 * integers(3, w.shape)), both_products)


@covering(num_ranks=[1, 2], kinds=[("row", "row"), ("row", "current")])
def test_kernels_with_one_scale_share_a_gather_with_kernels_of_several(
    num_ranks, kinds
):
    # The scales of a kernel with one column are one scale. In the gradient of x, only
    # the scales of several columns change along the contracted dimension.
    recipes = [RECIPES[kind] for kind in kinds]
    num_columns = 4, 1 if kinds == ("row", "row") else 4

    def layer(x, *ws):
        ws = (
            ub.quantize(w, recipe, role="kernel", axis_name="tp")
            for w, recipe in zip(ws, recipes, strict=True)
        )
        options = {"axis_name": "tp", "fp8": RECIPES["row"]}
        return jnp.concatenate(ub.all_gather_matmul(x, tuple(ws), **options), 1)

    def wanted(x, *ws):
        ys = (jnp.split(plain(x, w, 0.0), num_ranks, 1) for w in ws)
        return jnp.concatenate([y for pair in zip(*ys, strict=True) for y in pair], 1)

    specs = ROWS, COLUMNS, COLUMNS
    function = on_ranks(layer, tp_mesh(num_ranks), specs, COLUMNS)
    x, *_ = exact_operands()
    ws = (integers(i, (128, n * num_ranks)) for i, n in enumerate(num_columns))
    assert_exact(function, (x, *ws), wanted)


@pytest.mark.parametrize("method", ["direct", "ring_exchange"])
def test_the_gathered_array_has_the_scale_per_tensor_of_x(method):
    def layer(x, w):
        x = ub.quantize(x, RECIPE, axis_name="tp")
        w = ub.quantize(w, ub.fp8.RowwiseScaling(), role="kernel")
        options = {"axis_name": "tp", "method": method, "return_gathered": True}
        _, gathered = ub.all_gather_matmul(x, w, **options)
        assert gathered.scaling == "tensor"
        return gathered.dequantize("float32") + 0 * jax.lax.axis_index("tp")

    x, w, _ = exact_operands()
    gathered = on_ranks(layer, tp_mesh(2), (ROWS, COLUMNS), ROWS)(x, w)
    wanted = ub.quantize(x, RECIPE).dequantize("float32")
    assert_equal(gathered, np.concatenate([wanted] * 2))


HYBRID = ub.fp8.RowwiseScaling(fp8_format=ub.fp8.Format.HYBRID)


@pytest.mark.parametrize(
    ("second", "role"), [(RECIPES["row"], "kernel"), (HYBRID, "output_grad")]
)
def test_kernels_with_different_scales_or_formats_share_a_gather(second, role):
    # Role "output_grad" gives e5m2 values. Its scales belong to rows, so it quantizes
    # the transposed kernel.
    def layer(x, w1, w2):
        x, w1 = quantized(RECIPES["current"], x, w1)
        if role == "kernel":
            w2 = ub.quantize(w2, second, role=role)
        else:
            w2 = jax.tree.map(jnp.transpose, ub.quantize(w2.T, second, role=role))
        return jnp.stack(ub.all_gather_matmul(x, (w1, w2), axis_name="tp"))

    specs = ROWS, COLUMNS, COLUMNS
    function = on_ranks(layer, tp_mesh(2), specs, P(None, None, "tp"))
    x, w, _ = exact_operands()
    # Powers of two are exact in e5m2, too.
    values = x, w, np.sign(integers(3, w.shape))

    text = assert_exact(function, values, both_products)
    dgrad = next(line for line in call_lines(text) if "matmul_reduce_scatter" in line)
    assert "f8e" not in dgrad
