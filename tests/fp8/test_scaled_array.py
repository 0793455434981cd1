"""`ub.ScaledArray`, a checked pytree, and conversions to scales for GEMMs on GPUs."""

import dataclasses
import subprocess
import sys

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from fp8_formulas import E8M0
from jax.sharding import PartitionSpec as P
from refusals import zeros

import jax_ub as ub
from jax_ub._src import scaled_array

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def values(*shape):
    numbers = np.random.default_rng(0).integers(-8, 9, shape)
    return jnp.asarray(numbers, E4M3)


@pytest.mark.parametrize(
    ("shape", "scales", "scaling"),
    [
        ((4, 64), (), "tensor"),
        ((4, 64), (1, 1), "tensor"),
        ((64,), (1,), "tensor"),
        ((4, 64), (4, 1), "row"),
        ((4, 64), (1, 64), "row"),
        ((2, 3, 4, 64), (2, 3, 4, 1), "row"),
        ((4, 1, 8, 5), (1, 1, 1, 5), "row"),
        ((2, 4, 8, 5), (2, 1, 1, 5), "row"),
        ((4, 1), (4, 1), "row"),
    ],
)
def test_float32_scales(shape, scales, scaling):
    factors = jnp.asarray(np.exp(np.random.default_rng(1).standard_normal(scales)), "f")
    array = ub.ScaledArray(values(*shape), factors)
    assert array.scaling == scaling
    assert (array.shape, array.ndim, array.dtype) == (shape, len(shape), E4M3)
    expected = formulas.dequantize(array.values, factors)
    np.testing.assert_allclose(array.dequantize(jnp.float32), expected, rtol=1e-7)
    assert array.dequantize().dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((4, 64), (4, 2)),
        ((96, 5), (3, 5)),
        ((2, 4, 32), (2, 4, 1)),
        ((4, 64, 5), (4, 2, 5)),
    ],
)
def test_block_scales(shape, scales):
    exponents = np.random.default_rng(1).integers(-20, 20, scales)
    factors = jnp.asarray(2.0**exponents, jnp.float8_e8m0fnu)
    array = ub.ScaledArray(values(*shape), factors)
    assert array.scaling == "block"
    expected = formulas.dequantize(array.values, factors)
    np.testing.assert_array_equal(array.dequantize(jnp.float32), expected)
    exact = array.dequantize(jnp.bfloat16)
    np.testing.assert_array_equal(formulas.wide(exact), expected)


def test_an_e8m0_nan_makes_its_block_nan():
    bits = jnp.array([[127, 255]], jnp.uint8)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    found = ub.ScaledArray(jnp.ones((1, 64), E4M3), scales).dequantize(jnp.float32)
    assert np.all(found[:, :32] == 1)
    assert np.all(np.isnan(found[:, 32:]))


@pytest.mark.parametrize(
    "recipe",
    [
        ub.fp8.RowwiseScaling(),
        ub.fp8.MXFP8BlockScaling(),
        ub.fp8.Float8CurrentScaling(use_power_2_scales=True),
        ub.fp8.Float8CurrentScaling(),
    ],
)
def test_the_largest_f16_numbers_stay_finite(recipe):
    largest = float(jnp.finfo("float16").max)
    numbers = [largest, -largest, jnp.nan, 2.0]
    x = jnp.zeros((4, 32), jnp.float16).at[:, 0].set(jnp.array(numbers, "float16"))
    rows = [ub.quantize(row[None], recipe).dequantize() for row in x]
    np.testing.assert_array_equal(jnp.concatenate(rows)[:, 0], numbers)


def test_numbers_outside_of_f16_become_infinite():
    x = ub.ScaledArray(jnp.array([1, -1, 1.125], E4M3), jnp.float32(2.0**17))
    np.testing.assert_array_equal(x.dequantize("float16"), [jnp.inf, -jnp.inf, jnp.inf])
    x = ub.ScaledArray(jnp.array([1, jnp.inf], E5M2), jnp.float32(2.0**16))
    np.testing.assert_array_equal(x.dequantize("float16"), [65504, jnp.inf])


def test_it_is_a_frozen_pytree_with_named_leaves():
    x = jnp.ones((4, 8))
    array = ub.quantize(x)
    with pytest.raises(dataclasses.FrozenInstanceError):
        array.values = x
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(array)]
    assert paths == [".values", ".scales", ".source"]
    shapes = jax.eval_shape(lambda a: a, array)
    assert isinstance(shapes, ub.ScaledArray)
    specs = ub.ScaledArray(P("tp"), P(), P("tp"))
    assert jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)) == [
        P("tp"),
        P(),
        P("tp"),
    ]
    assert array.dequantize().dtype == x.dtype


def test_programs_that_take_and_return_it_can_be_serialized():
    x = ub.quantize(jnp.ones((32, 32)), ub.fp8.MXFP8BlockScaling())
    program = jax.export.export(jax.jit(lambda x: x))(x)
    copy = jax.export.deserialize(program.serialize())
    found = copy.call(x)
    assert isinstance(found, ub.ScaledArray)
    jax.tree.map(np.testing.assert_array_equal, found, x)


def test_scales_of_rows_are_exported_for_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")

    def dequantize(values, scales):
        return ub.ScaledArray(values, scales).dequantize(jnp.float32)

    def exported(*scale_shape):
        return jax.export.export(jax.jit(dequantize))(
            jax.ShapeDtypeStruct((2 * rows, 64), E4M3),
            jax.ShapeDtypeStruct(scale_shape, jnp.float32),
        )

    x, scales = values(6, 64), 2.0 ** jnp.arange(6)[:, None]
    found = exported(2 * rows, 1).call(x, scales)
    np.testing.assert_array_equal(found, formulas.dequantize(x, scales))
    text = "rows blocks of 2 along axis 0"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        exported(rows, 64)


@pytest.mark.slow
def test_a_process_that_only_registers_the_targets_can_load_them(tmp_path):
    x = ub.quantize(jnp.ones((32, 32)))
    program = jax.export.export(jax.jit(lambda x: x))(x)
    (tmp_path / "program").write_bytes(program.serialize())
    loads = (
        "import pathlib, sys, jax.export, jax_ub; jax_ub.register_targets();"
        "data = pathlib.Path(sys.argv[1]).read_bytes();"
        "print(jax.export.deserialize(bytearray(data)).in_tree)"
    )
    command = [sys.executable, "-c", loads, str(tmp_path / "program")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ScaledArray" in done.stdout


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        (zeros(64, 8), r"scales has shape \(64, 8\) .* 8 blocks of 8 along axis 1"),
        (zeros(64, 5), "the sizes do not divide. Use one scale, one per row"),
        (zeros(64), "the dimensions differ. Use one scale"),
        (zeros(64, 64), "only the contracted dimension of row scales has size 1"),
        (
            zeros(1, 1, dtype="float16"),
            "scales is float16. Use float32, or float8_e8m0fnu",
        ),
        (np.ones((64, 4), "float8_e8m0fnu"), r"blocks of \(16,\) in float8_e8m0fnu"),
        (np.ones((2, 2), "float8_e8m0fnu"), r"blocks of \(32, 32\) in float8_e8m0fnu"),
        (np.ones((), "float8_e8m0fnu"), "the dimensions differ"),
    ],
)
def test_wrong_scales_are_rejected(scales, text):
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        ub.ScaledArray(values(64, 64), scales)


def test_contracted_dimensions_are_consecutive():
    text = "only the contracted dimension of row scales has size 1, or several consec"
    with pytest.raises(ub.errors.ShapeContractError, match=text):
        ub.ScaledArray(values(4, 8, 5), zeros(1, 8, 1))


def test_wrong_values_and_sources_are_rejected():
    error, one = ub.errors.ShapeContractError, jnp.ones(())
    with pytest.raises(
        error, match="values is float32, which is none of float8_e4m3fn"
    ):
        ub.ScaledArray(jnp.ones((4, 4)), one)
    with pytest.raises(error, match="float8_e4m3fnuz, which is none of .*float8_e5m2"):
        ub.ScaledArray(jnp.ones((4, 4), "float8_e4m3fnuz"), one)
    with pytest.raises(error, match="scales is of type float, but the op takes an ar"):
        ub.ScaledArray(values(4, 4), 1.0)
    with pytest.raises(error, match="values is of type list, but the op takes an arr"):
        ub.ScaledArray([1.0], one)
    with pytest.raises(error, match=r"source is \(4, 5\) for values \(4, 4\)"):
        ub.ScaledArray(values(4, 4), one, jnp.ones((4, 5)))
    with pytest.raises(error, match="source is int32, but it receives a gradient"):
        ub.ScaledArray(values(4, 4), one, jnp.ones((4, 4), "int32"))
    with pytest.raises(
        error, match="ScaledArray.dequantize: dtype = .*int8.* not a res"
    ):
        ub.ScaledArray(values(4, 4), one).dequantize(jnp.int8)
    with pytest.raises(error, match="ScaledArray.dequantize: dtype = 'int9' is not a"):
        ub.ScaledArray(values(4, 4), one).dequantize("int9")


def random_values(rng, shape, dtype):
    """Returns random finite FP8 values, also small ones."""
    codes = rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    return np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))


@covering(axis=[0, 1], dtype=[E4M3, E5M2])
def test_blocks_are_converted_to_blocks_along_the_other_axis(dtype, axis):
    rng = np.random.default_rng(axis)
    values = random_values(rng, (64, 96), dtype)
    shape = (64, 3) if axis == 0 else (2, 96)  # along the other axis
    scales = (127 + rng.integers(-9, 10, shape)).astype(np.uint8).view(E8M0)
    assert scaled_array.changes_along(scales, values.shape, axis)
    convert = jax.jit(scaled_array.converted, static_argnums=2)
    found, found_scales = convert(values, scales, axis)
    x = formulas.dequantize(values, scales)
    exponents = formulas.block_exponents(x, axis, dtype)
    np.testing.assert_array_equal(np.asarray(found_scales).view(np.uint8), exponents)
    repeated = np.repeat(2.0 ** (exponents.astype(int) - 127), 32, axis)
    wanted = formulas.cast(x, repeated, dtype)
    np.testing.assert_array_equal(formulas.wide(found), formulas.wide(wanted))
    assert not scaled_array.changes_along(found_scales, values.shape, axis)


@covering(axis=[0, 1], dtype=[E4M3, E5M2])
def test_rows_are_converted_to_columns_and_columns_to_rows(dtype, axis):
    rng = np.random.default_rng(axis)
    values = random_values(rng, (48, 80), dtype)
    shape = (48, 1) if axis == 0 else (1, 80)
    scales = np.ldexp(np.float32(1), rng.integers(-9, 10, shape)).astype(np.float32)
    assert scaled_array.changes_along(scales, values.shape, axis)
    found, found_scales = scaled_array.converted(values, scales, axis)
    x = formulas.dequantize(values, scales)
    wanted_scales = formulas.row_scales(x, axis, dtype)
    np.testing.assert_array_equal(found_scales, wanted_scales)
    wanted = formulas.cast(x, wanted_scales, dtype)
    np.testing.assert_array_equal(formulas.wide(found), formulas.wide(wanted))
    assert not scaled_array.changes_along(found_scales, values.shape, axis)


def test_a_conversion_keeps_the_numbers_that_stay_normal():
    x = np.ldexp(np.float32(1.75), np.arange(-6, 7)).repeat(32)[:, None]
    x = np.broadcast_to(x, (x.size, 32))
    scales = formulas.block_exponents(x, 1, E4M3).view(E8M0)
    values = formulas.cast(x, np.repeat(scales, 32, 1).astype(np.float32), E4M3)
    found, found_scales = scaled_array.converted(values, scales, 0)
    np.testing.assert_array_equal(formulas.dequantize(found, found_scales), x)
