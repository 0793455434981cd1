"""Conversions of FP8 arrays to scales that a GEMM on GPUs multiplies."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_formulas import E8M0

from jax_ub._src import fp8_casts

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def values_of(rng, shape, dtype):
    """Returns random finite FP8 values, also small ones."""
    codes = rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    return np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_are_converted_to_blocks_along_the_other_axis(dtype, axis):
    rng = np.random.default_rng(axis)
    values = values_of(rng, (64, 96), dtype)
    shape = (64, 3) if axis == 0 else (2, 96)  # along the other axis
    scales = (127 + rng.integers(-9, 10, shape)).astype(np.uint8).view(E8M0)
    assert fp8_casts.changes_along(scales, values.shape, axis)
    convert = jax.jit(fp8_casts.converted, static_argnums=2)
    found, found_scales = convert(values, scales, axis)
    x = formulas.dequantize(values, scales)
    exponents = formulas.block_exponents(x, axis, dtype)
    np.testing.assert_array_equal(np.asarray(found_scales).view(np.uint8), exponents)
    repeated = np.repeat(2.0 ** (exponents.astype(int) - 127), 32, axis)
    wanted = formulas.cast(x, repeated, dtype)
    np.testing.assert_array_equal(formulas.wide(found), formulas.wide(wanted))
    assert not fp8_casts.changes_along(found_scales, values.shape, axis)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_converted_to_columns_and_columns_to_rows(dtype, axis):
    rng = np.random.default_rng(axis)
    values = values_of(rng, (48, 80), dtype)
    shape = (48, 1) if axis == 0 else (1, 80)
    scales = np.ldexp(np.float32(1), rng.integers(-9, 10, shape)).astype(np.float32)
    assert fp8_casts.changes_along(scales, values.shape, axis)
    found, found_scales = fp8_casts.converted(values, scales, axis)
    x = formulas.dequantize(values, scales)
    wanted_scales = formulas.row_scales(x, axis, dtype)
    np.testing.assert_array_equal(found_scales, wanted_scales)
    wanted = formulas.cast(x, wanted_scales, dtype)
    np.testing.assert_array_equal(formulas.wide(found), formulas.wide(wanted))
    assert not fp8_casts.changes_along(found_scales, values.shape, axis)


def test_a_conversion_keeps_the_numbers_that_stay_normal():
    x = np.ldexp(np.float32(1.75), np.arange(-6, 7)).repeat(32)[:, None]
    x = np.broadcast_to(x, (x.size, 32))
    scales = formulas.block_exponents(x, 1, E4M3).view(E8M0)
    values = formulas.cast(x, np.repeat(scales, 32, 1).astype(np.float32), E4M3)
    found, found_scales = fp8_casts.converted(values, scales, 0)
    np.testing.assert_array_equal(formulas.dequantize(found, found_scales), x)
