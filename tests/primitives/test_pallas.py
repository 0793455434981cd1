"""Tests where JAX's Pallas kernel of AG+GEMM can run, without a GPU."""

import dataclasses
import re
import sys

import jax
import pytest

from jax_ub._src.methods import PALLAS_TILES
from jax_ub._src.primitives import pallas

WIDE, TALL, NARROW = (PALLAS_TILES[i : i + 2] for i in (0, 2, 4))
SIZES = 8192, 8192, 10240


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1024, 64, 1024), PALLAS_TILES),
        ((512, 64, 1024), WIDE + NARROW),
        ((1024, 64, 512), TALL + NARROW),
        ((512, 64, 512), NARROW),
        ((512, 64, 320), ()),
        ((256, 64, 512), ()),
        ((512, 96, 512), ()),
    ],
)
def test_tiles_divide_the_rows_and_columns_of_a_rank(sizes, expected):
    assert pallas.tiles_for(*sizes, 4) == list(expected)


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    compute_capability: str


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that makes JAX report eight GPUs, and returns them."""

    def report_gpus(capability="9.0", processes=1):
        found = [Gpu(i, capability) for i in range(8)]
        monkeypatch.setattr(jax, "devices", lambda: found)
        monkeypatch.setattr(jax, "device_count", lambda: 8)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        return found

    return report_gpus


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="this jax runs the kernel without a barrier between the GPUs",
)
def test_a_hopper_process_with_all_gpus_has_the_kernel(gpus):
    for dtype in ("bfloat16", "float16"):
        assert pallas.why_not(gpus(), dtype, *SIZES) is None


@pytest.mark.parametrize(
    ("reported", "ranks", "dtype", "sizes", "reason"),
    [
        ({"capability": "8.0"}, range(8), "bfloat16", SIZES, "needs compute .* 9.0, "),
        ({"capability": "10.0"}, range(8), "bfloat16", SIZES, "not 10.0"),
        ({}, range(8), "float32", SIZES, "bfloat16 and float16, not float32"),
        ({"processes": 8}, range(8), "bfloat16", SIZES, "one process, not in 8"),
        ({}, range(4), "bfloat16", SIZES, "P is 4, and JAX has 8 devices"),
        ({}, range(1), "bfloat16", SIZES, "at least 2"),
        ({}, (*range(1, 8), 0), "bfloat16", SIZES, r"in the order of jax.devices\(\)"),
        ({}, range(8), "bfloat16", (64, 32, 48), "tiles do not divide"),
    ],
)
def test_another_call_has_a_reason(gpus, reported, ranks, dtype, sizes, reason):
    found = gpus(**reported)
    devices = [found[i] for i in ranks]
    assert re.search(reason, pallas.why_not(devices, dtype, *sizes))


def test_a_jax_without_the_barrier_has_no_kernel(gpus, monkeypatch):
    mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

    class CompilerParams:
        pass

    monkeypatch.setattr(mosaic_gpu, "CompilerParams", CompilerParams)
    reason = pallas.why_not(gpus(), "bfloat16", *SIZES)
    assert "without a barrier between the GPUs. Install jax 0.11.2" in reason


def test_a_jax_without_the_kernel_has_a_reason(gpus, monkeypatch):
    kernels = pytest.importorskip("jax.experimental.pallas.ops.gpu")
    name = "collective_matmul_mgpu"
    monkeypatch.delattr(kernels, name, raising=False)
    monkeypatch.setitem(sys.modules, f"{kernels.__name__}.{name}", None)
    reason = pallas.why_not(gpus(), "bfloat16", *SIZES)
    assert f"jax {jax.__version__} does not have it" in reason
