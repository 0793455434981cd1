"""FP8 recipes in numpy and ml_dtypes, written separately from the library."""

import ml_dtypes
import numpy as np

E4M3, E5M2, E8M0 = (
    np.dtype(name)
    for name in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e8m0fnu,
    )
)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def wide(array) -> np.ndarray:
    """Converts an array to f64, which is exact."""
    return np.asarray(array).astype(np.float64)


def cast(x, scales, dtype) -> np.ndarray:
    """Divides by scales, clips and rounds once."""
    largest = LARGEST[np.dtype(dtype)]
    inverse = np.float32(1) / np.asarray(scales, np.float32)
    divided = np.asarray(x).astype(np.float32) * inverse
    return np.clip(divided, -largest, largest).astype(dtype)


def current_scale(x, dtype, *, power_of_two=False, epsilon=0.0) -> np.float32:
    """Returns the scale of one tensor: amax / max, or 1."""
    amax = np.max(np.abs(np.asarray(x).astype(np.float32)))
    amax = np.maximum(amax, np.float32(epsilon))
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    inverse = np.float32(LARGEST[np.dtype(dtype)]) / amax
    if power_of_two:
        inverse = np.float32(2.0 ** np.floor(np.log2(np.float64(inverse))))
    return np.float32(1) / inverse


def exponent_above(amax, dtype) -> np.ndarray:
    """Returns the smallest integers e with amax <= max * 2^e."""
    with np.errstate(divide="ignore"):
        ratio = np.asarray(amax, np.float64) / LARGEST[np.dtype(dtype)]
        return np.ceil(np.log2(ratio))


def row_scales(x, axis, dtype) -> np.ndarray:
    """Returns power-of-two scales of rows, as torchao's recipe "rowwise"."""
    amax = np.max(np.abs(wide(x)), axis=axis, keepdims=True)
    exponents = exponent_above(np.maximum(amax, np.float32(1e-12)), dtype)
    return (2.0**exponents).astype(np.float32)


def block_exponents(x, axis, dtype) -> np.ndarray:
    """Returns the biased exponents of e8m0 scales of blocks of 32 along an axis."""
    moved = np.moveaxis(wide(x), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], moved.shape[-1] // 32, 32)
    amax = np.max(np.abs(blocks), axis=-1)
    with np.errstate(invalid="ignore"):
        bits = np.clip(exponent_above(amax, dtype) + 127, 0, 254)
        bits = np.where(np.isnan(amax), 255, bits).astype(np.uint8)
    return np.moveaxis(bits, -1, axis)


def dequantize(values, scales) -> np.ndarray:
    """Multiplies values by their scales in f64, each scale by its block."""
    values, scales = wide(values), np.asarray(scales)
    scales = wide(scales).reshape((1,) * (values.ndim - scales.ndim) + scales.shape)
    for axis, size in enumerate(values.shape):
        scales = np.repeat(scales, size // scales.shape[axis], axis)
    return values * scales
