"""`ub.quantize` against formulas in numpy and ml_dtypes."""

import functools
import math

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from fp8_formulas import E4M3, E5M2, E8M0
from scaled_operands import DEFAULT_RECIPES as RECIPES

import jax_ub as ub
from jax_ub._src.scaled_array import cast

FP8 = ub.fp8
ROLES = ("input", "kernel", "output_grad")
SHAPES = [(64, 96), (2, 3, 32), (32, 64)]


def same_bits(found, expected):
    """Asserts equal FP8 arrays, with any NaN in place of a NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    is_nan = np.isnan(found.astype(np.float32))
    np.testing.assert_array_equal(is_nan, np.isnan(expected.astype(np.float32)))
    pair = (array.view(np.uint8)[~is_nan] for array in (found, expected))
    np.testing.assert_array_equal(*pair)


def normal(shape, dtype="float32", seed=0):
    values = np.random.default_rng(seed).standard_normal(shape) * 3
    return jnp.asarray(values, dtype)


def edges(dtype):
    """Returns numbers where casts go wrong, and ties between neighbors."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    middle = (finite[1:] + finite[:-1]) / 2
    numbers = [finite, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]
    extra = [448, 464, 465, 57344, 61440, 61441, 1e30, np.inf, np.nan, 0.0, -0.0]
    extra += [2.0**-9, 2.0**-10, 2.0**-11, 2.0**-16, 2.0**-17, 2.0**-18]
    numbers += [np.float32(extra), -np.float32(extra)]
    return np.concatenate(numbers).astype(np.float32)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.3, 3e4])
def test_casts_clip_then_round_once(dtype, scale):
    x = np.float32(scale) * edges(dtype)
    scales = np.full((1,), scale, np.float32)
    found = jax.jit(cast, static_argnums=2)(x, scales, dtype)
    same_bits(found, formulas.cast(x, scales, dtype))


def test_casts_do_not_round_to_bf16_or_f16_first():
    x = normal((1 << 16,))
    found = np.asarray(jax.jit(cast, static_argnums=2)(x, jnp.ones(1), E4M3))
    same_bits(found, np.asarray(x).astype(E4M3))
    assert np.any(found != np.asarray(x).astype(jnp.bfloat16).astype(E4M3))


def codes(x):
    """Returns the bits of FP8 numbers."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_have_the_bits_of_xlas_conversion(dtype):
    # The codes of NaN and the sign of zero, too.
    every_bf16 = jnp.asarray(np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16))
    bits = np.random.default_rng(0).integers(1 << 32, size=1 << 20, dtype=np.uint32)
    # The other f32 numbers with an FP8 exponent, and with any last bits.
    dense = np.arange(0x32000000, 0x48000000, 0x101, dtype=np.uint32)
    numbers = (bits, dense, dense | 0x80000000)
    largest = float(jnp.finfo(dtype).max)
    ties = np.resize(edges(dtype), 1 << 16)  # smaller arrays are converted by XLA
    for x in (every_bf16, ties, *(n.view(np.float32) for n in numbers)):
        found = jax.jit(lambda x: codes(cast(x, jnp.ones(1), dtype)))(x)
        wide = jnp.asarray(x, jnp.float32)
        clipped = jnp.clip(wide, -largest, largest)
        np.testing.assert_array_equal(found, codes(clipped.astype(dtype)))


@covering(
    dtype=["float32", "bfloat16", "float16"], role=ROLES, power_of_two=[False, True]
)
def test_current_scaling(dtype, role, power_of_two):
    x = normal((48, 32), dtype)
    recipe = FP8.Float8CurrentScaling(use_power_2_scales=power_of_two)
    found = jax.jit(lambda x: ub.quantize(x, recipe, role=role))(x)
    fp8 = E5M2 if role == "output_grad" else E4M3
    scale = formulas.current_scale(x, fp8, power_of_two=power_of_two)
    assert found.scales.shape == (1, 1)
    assert found.scales[0, 0] == scale
    same_bits(found.values, formulas.cast(x, scale, fp8))
    assert found.source.dtype == dtype
    if power_of_two:
        assert np.frexp(scale)[0] == 0.5
        assert np.max(np.abs(wide(x))) <= scale * formulas.LARGEST[fp8]


def wide(array):
    return formulas.wide(array)


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan])
def test_an_amax_that_is_no_number_gives_scale_1(amax):
    x = jnp.array([[0.5, amax]], jnp.float32)
    found = ub.quantize(x, FP8.Float8CurrentScaling())
    assert found.scales == 1.0 or amax == 0.0
    expected = formulas.cast(x, formulas.current_scale(x, E4M3), E4M3)
    same_bits(found.values, expected)
    zeros = ub.quantize(jnp.zeros((2, 2)), FP8.Float8CurrentScaling())
    assert zeros.scales == 1.0


# XLA:CPU drops NaNs from maxima of floating-point numbers in arrays of such sizes.
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
@pytest.mark.parametrize(
    "dtype, shape",
    [
        (jnp.float32, (64, 64)),
        (jnp.float32, (33, 4097)),
        (jnp.bfloat16, (4096, 1024)),
        (jnp.float16, (64, 64)),
    ],
)
def test_a_nan_in_a_large_array_is_found(dtype, shape, nan):
    x = jnp.ones(shape, dtype).at[3, 5].set(nan)
    assert ub.quantize(x, FP8.Float8CurrentScaling()).scales == 1.0
    rows = ub.quantize(2 * x, FP8.RowwiseScaling()).scales
    assert rows[3, 0] == 1.0
    assert jnp.all(rows[4:] == 2.0**-7)
    if shape[1] % 32 == 0:
        blocks = ub.quantize(x, FP8.MXFP8BlockScaling()).scales
        bits = np.asarray(blocks).view(np.uint8)
        assert bits[3, 0] == 0xFF
        assert np.count_nonzero(bits == 0xFF) == 1


def test_tiny_tensors_have_a_scale_with_a_normal_inverse():
    x = jnp.full((2, 4), 2.0**-125, jnp.float32)
    found = ub.quantize(x, FP8.Float8CurrentScaling())
    assert found.scales == 2.0**-126
    np.testing.assert_array_equal(found.dequantize(jnp.float32), x)


def test_qparams_are_per_role():
    recipe = FP8.Float8CurrentScaling(
        fp8_quant_fwd_inp=FP8.QParams(amax_epsilon=100.0),
        fp8_quant_fwd_weight=FP8.QParams(power_2_scale=True),
    )
    x = jnp.full((2, 4), 3.0)
    assert ub.quantize(x, recipe).scales == np.float32(1) / np.float32(448 / 100)
    assert ub.quantize(x, recipe, role="kernel").scales == 2.0**-7


@covering(shape=SHAPES, role=ROLES)
def test_rowwise_scaling(shape, role):
    axis = -2 if role == "kernel" else -1
    rows = 2.0 ** np.random.default_rng(1).integers(-30, 30, shape[:-1] + (1,))
    x = normal(shape) * jnp.asarray(rows, jnp.float32)
    found = jax.jit(lambda x: ub.quantize(x, FP8.RowwiseScaling(), role=role))(x)
    scales = formulas.row_scales(x, axis, E4M3)
    np.testing.assert_array_equal(found.scales, scales)
    same_bits(found.values, formulas.cast(x, scales, E4M3))
    assert found.scaling == "row"


def test_rows_of_zeros_have_a_scale():
    found = ub.quantize(jnp.zeros((3, 4)), FP8.RowwiseScaling())
    assert np.all(found.scales > 0)
    assert np.all(found.dequantize() == 0)


def test_the_largest_value_of_a_row_counts_as_at_least_1e_12():
    x = jnp.asarray([[1e-12, 0], [3e-18, -4e-18]], jnp.float32)
    found = ub.quantize(x, FP8.RowwiseScaling())
    assert found.scales[0] == found.scales[1]
    least = found.scales[1, 0] * jnp.finfo(E4M3).smallest_subnormal.astype("float32")
    np.testing.assert_array_equal(found.dequantize("float32")[1], [0, -least])


@covering(
    case=[
        ((1, 32), "input"),
        ((5, 96), "input"),
        ((2, 3, 64), "output_grad"),
        ((64, 7), "kernel"),
    ],
    form=[FP8.Format.E4M3, FP8.Format.HYBRID],
)
def test_block_scaling(case, form):
    shape, role = case
    axis = -2 if role == "kernel" else -1
    x = normal(shape) * jnp.exp2(jnp.round(normal(shape, seed=1) * 4))
    recipe = FP8.MXFP8BlockScaling(fp8_format=form)
    found = jax.jit(lambda x: ub.quantize(x, recipe, role=role))(x)
    is_e5m2 = form is FP8.Format.HYBRID and role == "output_grad"
    fp8 = E5M2 if is_e5m2 else E4M3
    bits = formulas.block_exponents(x, axis, fp8)
    np.testing.assert_array_equal(np.asarray(found.scales).view(np.uint8), bits)
    expanded = np.repeat(2.0 ** (bits.astype(np.float64) - 127), 32, axis)
    same_bits(found.values, formulas.cast(x, expanded, fp8))


def test_block_exponents_cover_their_range():
    exponents = np.arange(-126, 128)
    amax = np.stack([2.0**exponents, 1.75 * 2.0**exponents], -1).reshape(-1, 1)
    above = np.nextafter(amax.astype(np.float32), np.float32(np.inf))
    x = np.concatenate([amax, above]).astype(np.float32)
    x = np.pad(x, [(0, 0), (0, 31)])
    found = ub.quantize(jnp.asarray(x), FP8.MXFP8BlockScaling())
    bits = formulas.block_exponents(x, -1, E4M3)
    np.testing.assert_array_equal(np.asarray(found.scales).view(np.uint8), bits)
    assert not np.any(np.isnan(wide(found.values)))
    exact = formulas.dequantize(found.values, found.scales)
    bound = np.maximum(2.0**-4 * np.abs(wide(x)), 2.0**-10 * 2.0 ** (bits - 127.0))
    assert np.all(np.abs(exact - wide(x)) <= bound)
    np.testing.assert_array_equal(found.dequantize(jnp.float32), exact)


def test_blocks_of_zeros_infinities_and_nan():
    x = np.ones((4, 32), np.float32)
    x[0] = 0
    x[1, 3], x[2, 4] = np.inf, np.nan
    found = ub.quantize(jnp.asarray(x), FP8.MXFP8BlockScaling())
    bits = np.asarray(found.scales).view(np.uint8)
    np.testing.assert_array_equal(bits[:3], [[0x00], [0xFE], [0xFF]])
    wide_values = wide(found.values)
    assert np.all(wide_values[0] == 0)
    assert wide_values[1, 3] == 448
    assert np.isnan(wide_values[2, 4])
    dequantized = np.asarray(found.dequantize(jnp.float32))
    assert np.all(dequantized[0] == 0)
    assert np.all(np.isnan(dequantized[2]))


def test_the_margin_of_block_scales_is_an_exponent():
    x = normal((2, 64))
    plain = ub.quantize(x, FP8.MXFP8BlockScaling())
    shifted = ub.quantize(x, FP8.MXFP8BlockScaling(margin=2))
    bits = [np.asarray(q.scales).view(np.uint8).astype(int) for q in (plain, shifted)]
    np.testing.assert_array_equal(bits[0] + 2, bits[1])


@covering(
    recipe=[
        FP8.Float8CurrentScaling(),
        FP8.MXFP8BlockScaling(),
        FP8.MXFP8BlockScaling(fp8_format=FP8.Format.HYBRID),
        FP8.RowwiseScaling(),
    ],
    role=ROLES,
)
def test_every_element_is_within_the_bound_of_its_format(recipe, role):
    x = normal((64, 128))
    found = ub.quantize(x, recipe, role=role)
    half, smallest = (2.0**-4, 2.0**-10) if found.dtype == E4M3 else (2.0**-3, 2**-17)
    ones = np.asarray(jnp.ones_like(found.values))
    scale = formulas.dequantize(ones, found.scales)
    error = np.abs(formulas.dequantize(found.values, found.scales) - wide(x))
    slack = 1 + 2.0**-20  # the f32 division rounds, too
    assert np.all(error <= slack * np.maximum(half * np.abs(wide(x)), smallest * scale))
    np.testing.assert_array_equal(
        found.dequantize(jnp.float32),
        formulas.dequantize(found.values, found.scales).astype(np.float32),
    )


def test_gradients_arrive_in_the_source_in_its_dtype():
    x = normal((4, 8), "bfloat16")

    def loss(x):
        quantized = ub.quantize(x)
        return jnp.sum(quantized.source * 3) + jnp.sum(quantized.dequantize())

    gradient = jax.grad(loss)(x)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, jnp.full_like(x, 3))


def test_it_works_under_jit_vmap_and_scan():
    x = normal((3, 4, 64))
    for recipe in (FP8.Float8CurrentScaling(), FP8.MXFP8BlockScaling()):
        quantized = jax.vmap(lambda x, r=recipe: ub.quantize(x, r))(x)
        _, scanned = jax.lax.scan(lambda _, x, r=recipe: (0, ub.quantize(x, r)), 0, x)
        for i in range(3):
            one = jax.jit(lambda x, r=recipe: ub.quantize(x, r))(x[i])
            for many in (quantized, scanned):
                jax.tree.map(
                    np.testing.assert_array_equal,
                    jax.tree.map(lambda a, i=i: a[i], many),
                    one,
                )


@pytest.mark.parametrize("role", ["input", "kernel"])
def test_blocks_are_sharded_on_an_explicit_mesh(role):
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=types)
    x, recipe = normal((64, 128)), RECIPES["block"]
    wanted = ub.quantize(x, recipe, role=role)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.P("dp", "tp"))
        found = jax.jit(lambda x: ub.quantize(x, recipe, role=role))(sharded)
        wide = jax.jit(ub.ScaledArray.dequantize)(found)
    same_bits(found.values, wanted.values)
    np.testing.assert_array_equal(wide, wanted.dequantize())


def test_params_are_quantized_by_a_selection():
    params = {
        "a": {"kernel": normal((8, 4)), "bias": normal((4,))},
        "e": normal((5, 3)),
    }
    found = FP8.quantize_params(
        params, FP8.RowwiseScaling(), select=lambda path, leaf: "kernel" in str(path)
    )
    assert isinstance(found["a"]["kernel"], ub.ScaledArray)
    assert found["a"]["kernel"].scales.shape == (1, 4)
    assert found["a"]["bias"] is params["a"]["bias"]
    assert found["e"] is params["e"]
    everything = FP8.quantize_params(params)
    assert isinstance(everything["e"], ub.ScaledArray)
    one = ub.quantize(params["e"], role="kernel")
    jax.tree.map(np.testing.assert_array_equal, everything["e"], one)
    again = FP8.quantize_params(everything)
    assert again["e"] is everything["e"]
    again = FP8.quantize_params(everything, select=lambda path, leaf: leaf.ndim == 2)
    assert again["e"] is everything["e"]
    blocks = FP8.quantize_params({"k": normal((32, 2))}, FP8.MXFP8BlockScaling())
    assert blocks["k"].scales.dtype == E8M0


@pytest.mark.parametrize(
    ("array", "recipe", "text"),
    [
        (np.ones((48, 2), "float32"), "block", "K = 48 is no multiple of 32"),
        (np.ones(3, "float32"), "current", r"has shape \(3,\), but the op takes"),
        (np.ones((0, 2), "float32"), "current", r"has shape \(0, 2\), which is empty"),
        (np.ones((2, 2), "int32"), "row", "is int32, but the op takes float32"),
    ],
)
def test_errors_of_params_name_the_array(array, recipe, text):
    params = {"w": jnp.ones((32, 2)), "layers": [array]}
    with pytest.raises(
        ub.errors.ShapeContractError,
        match=r"quantize_params: params\['layers'\]\[0\].*" + text,
    ):
        FP8.quantize_params(params, RECIPES[recipe], select=lambda path, leaf: True)


@pytest.mark.parametrize("recipe", ["row", "block", "current"])
@pytest.mark.parametrize(
    ("shape", "num_contracted"),
    [((64, 3, 5), 1), ((3, 64, 5), 2), ((2, 3, 32, 5), 3), ((1, 32, 5), 2)],
)
def test_kernels_of_several_dimensions_have_the_values_of_matrices(
    recipe, shape, num_contracted
):
    recipe, ins = RECIPES[recipe], math.prod(shape[:num_contracted])
    kernels = normal((2, *shape))  # of two layers

    def quantize(kernel, select):
        given = {"kernel": kernel}
        return FP8.quantize_params(given, recipe, select=lambda *_: select)["kernel"]

    found = jax.jit(jax.vmap(functools.partial(quantize, select=num_contracted)))(
        kernels
    )
    for i, kernel in enumerate(kernels):
        wanted = ub.quantize(kernel.reshape(ins, -1), recipe, role="kernel")
        array = ub.ScaledArray(found.values[i], found.scales[i], found.source[i])
        assert array.scaling == wanted.scaling
        same_bits(array.values.reshape(wanted.shape), wanted.values)
        scales = array.scales.reshape(wanted.scales.shape)
        np.testing.assert_array_equal(scales, wanted.scales)
        wide = array.dequantize(jnp.float32)
        assert wide.shape == shape
        np.testing.assert_array_equal(
            wide.reshape(wanted.shape), wanted.dequantize(jnp.float32)
        )


@pytest.mark.parametrize(
    ("recipe", "shape", "answer", "text"),
    [
        ("row", (8, 4, 5), True, "RowwiseScaling needs the number of its contracted"),
        ("block", (8, 32, 5), True, "MXFP8BlockScaling needs .* Return it from select"),
        (
            "row",
            (8, 4, 5),
            3,
            "select returned 3 contracted .* from 1 to 2",
        ),
        ("current", (8, 4), -1, "select returned -1 contracted .* from 1 to 1"),
        ("block", (8, 16, 5), 2, "last contracted dimension, 16, is no multiple of 32"),
        ("block", (48, 4, 32), 1, "K = 48 is no multiple of 32"),
    ],
)
def test_a_wrong_number_of_contracted_dimensions(recipe, shape, answer, text):
    params = {"w": np.ones(shape, "float32")}
    with pytest.raises(
        ub.errors.ShapeContractError, match=rf"quantize_params: params\['w'\].* {text}"
    ):
        FP8.quantize_params(params, RECIPES[recipe], select=lambda *_: answer)


def test_one_scale_needs_no_number_of_contracted_dimensions():
    found = FP8.quantize_params([normal((4, 3, 5))], select=lambda *_: True)[0]
    assert found.scales.shape == (1, 1, 1)


def test_params_are_selected_by_a_function():
    text = r"quantize_params: select = 'k' is not a function\. Pass one\."
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        FP8.quantize_params({"k": jnp.ones((32, 2))}, select="k")
