import numpy as np
import pytest

from jax_ub._src.tools.bench import gemm_cases, onednn
from jax_ub._src.tools.bench.cases import ONEDNN, Place
from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.dots import LAYOUTS, FastestDots
from jax_ub._src.tools.bench.gemm_cases import local_shapes
from jax_ub._src.tools.bench.workloads import Shape


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


def test_it_is_no_peer_of_gpus(monkeypatch):
    monkeypatch.setattr(Ranks, "platform", "gpu")
    monkeypatch.setattr(onednn, "find", lambda dtype, layout: pytest.fail("asked for"))
    place = Place(Ranks(1), "float32", "auto", FastestDots(), ("nn",))
    (case,) = gemm_cases.gemm(place, Shape(16, 16, 16))
    assert ONEDNN not in [candidate.name for candidate in case.candidates]
    assert not case.notes
