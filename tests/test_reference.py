"""The plain formulas of FP8 products, against f64."""

import fp8_formulas as formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_formulas import E4M3, E5M2
from jax.sharding import PartitionSpec as P
from programs import on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src import reference


def integers(seed, shape, dtype):
    """Returns integers that are exact in FP8, with exact sums of products."""
    most = 8 if dtype == E4M3 else 4
    values = np.random.default_rng(seed).integers(-most, most + 1, shape)
    return jnp.asarray(values, dtype)


def powers(seed, shape, dtype="float32"):
    exponents = np.random.default_rng(seed).integers(-3, 4, shape)
    return jnp.asarray(2.0**exponents, dtype)


SCALES = {
    "tensor": ((), ()),
    "ones": ((1, 1, 1), (1, 1)),
    "row": ((2, 3, 1), (1, 5)),
    "block": ((2, 3, 2), (2, 5)),
    "inner": ((2, 1, 64), (64, 1)),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
def test_products_are_exact(kind, pair):
    x, w = integers(0, (2, 3, 64), pair[0]), integers(1, (64, 5), pair[1])
    dtype = "float8_e8m0fnu" if kind == "block" else "float32"
    scales = tuple(powers(i, s, dtype) for i, s in enumerate(SCALES[kind]))
    wide_x, wide_w = map(formulas.dequantize, (x, w), scales)
    found = jax.jit(lambda x, w, s: reference.dot(x, w, scales=s))(x, w, scales)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, wide_x @ wide_w)
    flipped = scales[0], scales[1].T
    found = reference.dot(x, w.T, rhs_transposed=True, scales=flipped)
    np.testing.assert_array_equal(found, wide_x @ wide_w)


@pytest.mark.parametrize("kind", ["tensor", "ones", "row", "block", "columns"])
def test_kernel_gradients_are_exact(kind):
    x, dy = integers(0, (2, 3, 64), E4M3), integers(1, (2, 3, 32), E5M2)
    shapes = {
        "block": ((2, 3, 2), (2, 3, 1)),
        "columns": ((1, 1, 64), (1, 1, 32)),
    }.get(kind, SCALES.get(kind, ())[:1] * 2)
    dtype = "float8_e8m0fnu" if kind == "block" else "float32"
    scales = tuple(powers(i, shape, dtype) for i, shape in enumerate(shapes))
    wide_x, wide_dy = map(formulas.dequantize, (x, dy), scales)
    found = reference.outer(x, dy, scales=scales)
    np.testing.assert_array_equal(found, np.einsum("bmk,bmn->kn", wide_x, wide_dy))


def test_every_product_of_two_codes_is_exact():
    codes = np.arange(256, dtype=np.uint8)
    x, w = (codes.view(dtype) for dtype in (E4M3, E5M2))
    x, w = x[np.isfinite(x.astype("f"))], w[np.isfinite(w.astype("f"))]
    scales = jnp.ones(()), jnp.ones(())
    found = reference.dot(jnp.asarray(x)[:, None], jnp.asarray(w)[None], scales=scales)
    np.testing.assert_array_equal(found, np.outer(formulas.wide(x), formulas.wide(w)))


def test_the_f32_sum_is_within_its_bound():
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((256, 8)).astype(np.float32)
    for recipe in (ub.fp8.Float8CurrentScaling(), ub.fp8.RowwiseScaling()):
        a, b = ub.quantize(x, recipe), ub.quantize(w, recipe, role="kernel")
        found = reference.dot(a.values, b.values, scales=(a.scales, b.scales))
        wide_a = formulas.dequantize(a.values, a.scales)
        wide_b = formulas.dequantize(b.values, b.scales)
        bound = (256 + 4) * 2.0**-24 * (np.abs(wide_a) @ np.abs(wide_b))
        assert np.all(np.abs(wide_a @ wide_b - found) <= bound)
        # The rounding of both operands: 0.037 for e4m3, in the Frobenius norm.
        error = np.linalg.norm(found - x @ w) / np.linalg.norm(x @ w)
        assert error < 1.2 * 0.037


def test_an_e8m0_nan_makes_its_block_nan():
    bits = jnp.array([[127, 255]], jnp.uint8)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)
    found = reference.dequantize(jnp.ones((1, 64), jnp.float8_e4m3fn), scales)
    assert np.all(found[:, :32] == 1)
    assert np.all(np.isnan(found[:, 32:]))


def test_fp8_travels_as_bytes():
    def gather(values, scales):
        return (
            reference.all_gather(values, "tp"),
            reference.all_gather_scales(values, scales, "tp"),
        )

    function = on_ranks(gather, tp_mesh(4), P("tp"), P("tp"))
    x = integers(0, (8, 32), E4M3)
    for scales in (powers(0, (8, 1)), powers(0, (8, 1), "float8_e8m0fnu")):
        values, found = function(x, scales)
        np.testing.assert_array_equal(values, jnp.concatenate([x] * 4))
        np.testing.assert_array_equal(found, jnp.concatenate([scales] * 4))
    text = function.lower(x, scales).compile().as_text()
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(lines) == 2
    assert all("= u8[" in line for line in lines)
