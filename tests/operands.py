"""Arrays that tests multiply, and the tolerances of results.

The arrays are NumPy's: XLA would compile a program for each `jax.Array` of one device
that JAX distributes over a mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
from covering import nightly
from layouts import pairs_of_parts

DTYPES = ("float32", "bfloat16", "float16")
RANK_COUNTS = (1, 2, 3, 8, *nightly(4, 5))  # most other tests run four


def small_integers(seed: int, shape: tuple[int, ...], dtype="float32") -> np.ndarray:
    """Returns small integers, for which all products and sums are exact in `dtype`.

    The result does not depend on the order of the sums, so tests can check equality,
    which detects misplaced chunks that a tolerance might hide.
    """
    values = np.random.default_rng(seed).integers(-1, 2, shape)
    return values.astype(jnp.dtype(dtype))


def normal(seed: int, shape: tuple[int, ...], dtype="float32") -> np.ndarray:
    """Returns normally distributed values."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values.astype(jnp.dtype(dtype))


def tolerance(dtype, num_products: int) -> float:
    """Returns the largest rounding error of a sum of K products of normal values.

    The f32 sum of K products deviates by about sqrt(K) roundings of values of size
    sqrt(K); the result of that size is rounded once more, to `dtype`. Four standard
    deviations of both are allowed.
    """
    size = num_products**0.5
    summed = size * size * float(jnp.finfo(jnp.float32).eps)
    rounded = size * float(jnp.finfo(dtype).eps)
    return 4 * (summed + rounded)


def assert_equal(actual, expected) -> None:
    """Asserts that two trees of arrays have equal dtypes, shapes and values."""
    jax.tree.map(_assert_equal_leaf, actual, expected)


def _assert_equal_leaf(actual, expected):
    assert actual.dtype == expected.dtype
    for found, wanted in _parts(actual, expected):
        np.testing.assert_array_equal(found, wanted)


def assert_close(actual, expected, num_products: int) -> None:
    """Asserts that two arrays differ at most by rounding."""
    for found, wanted in _parts(actual, expected):
        atol = tolerance(actual.dtype, num_products)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def _parts(actual, expected):
    assert actual.shape == expected.shape
    for found, wanted in pairs_of_parts(actual, expected):
        yield np.asarray(found, np.float32), np.asarray(wanted, np.float32)
