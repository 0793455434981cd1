import numpy as np
import pytest

from jax_ub.bench import onednn
from jax_ub.bench.dots import LAYOUTS
from jax_ub.bench.gemm_cases import local_shapes
from jax_ub.bench.workloads import Shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_onednn_multiplies_and_adds(layout):
    gemm = onednn.find("float32", layout)
    if isinstance(gemm, str):
        pytest.skip(gemm)
    left, right, out = local_shapes(layout, Shape(3, 4, 5))
    random = np.random.default_rng(0)
    a = random.integers(-3, 4, left).astype(np.float32)
    b = random.integers(-3, 4, right).astype(np.float32)
    y = np.ones(out, np.float32)
    assert gemm(a, b, y, 1.0) == 0
    product = {"nn": a @ b if layout == "nn" else None}.get(layout)
    if layout == "nt":
        product = a @ b.T
    if layout == "tn":
        product = a.T @ b
    np.testing.assert_array_equal(y, product + 1)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(onednn, "_library", lambda: None)
    assert "oneDNN is not installed" in onednn.find("float32", "nn")


def test_a_missing_gemm_is_named():
    if onednn._library() is None:
        pytest.skip("oneDNN is not installed")
    assert "no GEMM for float16" in onednn.find("float16", "nn")
