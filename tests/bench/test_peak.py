"""The peak: what the engine measures, and what becomes of it."""

import types

import pytest

from jax_ub import _cpu
from jax_ub._src.tools.bench import cases, peak
from jax_ub._src.tools.bench.devices import Ranks


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_dtype_of_the_engine_has_a_peak(dtype):
    assert 0 < _cpu.peak_gflops(dtype, 1e-3) < float("inf")


@pytest.mark.parametrize(
    ("dtype", "duration_s", "text"),
    [
        ("f64", 1e-3, "dtype 'f64' is none of f32, bf16, f16"),
        ("f32", 0.0, "duration_s is 0.000000, expected more than 0 and at most 60"),
        ("f32", float("nan"), "duration_s is nan, expected more than 0"),
    ],
)
def test_what_has_no_peak_is_refused(dtype, duration_s, text):
    with pytest.raises(ValueError, match=text):
        _cpu.peak_gflops(dtype, duration_s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_at_the_peak_takes_as_long_as_its_operations(dtype):
    (candidate,) = peak.at_peak(Ranks(2), dtype, 10**9)
    assert candidate.name == cases.PEAK
    assert candidate.seconds() > 0
    candidate.program = lambda *operands: 200.0
    assert candidate.seconds() == pytest.approx(5e-3)


def test_a_machine_that_is_slower_than_it_was_has_lost_a_part(monkeypatch):
    monkeypatch.setattr(peak, "_best", {})
    (candidate,) = peak.at_peak(Ranks(2), "float32", 10**9)
    rates = iter([100.0, 75.0, 200.0])
    candidate.program = lambda *operands: next(rates)
    lost = []
    for _ in range(3):
        candidate.seconds()
        lost.append(candidate.lost)
    assert lost == [0.0, 0.25, 0.0]


def test_a_call_without_products_has_no_peak_and_neither_has_one_on_gpus():
    assert peak.at_peak(Ranks(1), "float32", 0) == []
    assert peak.at_peak(types.SimpleNamespace(platform="gpu"), "float32", 8) == []
