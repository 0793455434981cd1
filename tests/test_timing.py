import sys
import types

import jax.numpy as jnp
import pytest

from jax_ub import _cpu
from jax_ub._src.tools import timing
from jax_ub._src.tools.bench import report
from jax_ub._src.tools.devices import Ranks
from jax_ub._src.tools.timing import (
    BackgroundLoad,
    Candidate,
    Summary,
    Timer,
    WithThreads,
    interleave,
    peak_candidates,
    ratio,
    summarize,
)
from jax_ub.errors import UnsupportedOverlapError


class Clock:
    """A fake clock that programs advance, so that no test measures the machine."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def recording(name, log, seconds=0.0):
    def program():
        log.append(name)
        timing.time.now_s += seconds

    return Candidate(name, program, [])


def test_every_candidate_runs_once_in_each_round():
    log = []
    candidates = [recording(name, log) for name in "abc"]
    rounds = interleave(candidates, 4)
    assert all(len(seconds) == 4 for seconds in rounds.seconds.values())
    for start in range(0, len(log), 3):
        assert sorted(log[start : start + 3]) == ["a", "b", "c"]


def test_the_order_of_a_round_is_the_same_in_every_run():
    first, second = [], []
    interleave([recording(name, first) for name in "abc"], 5)
    interleave([recording(name, second) for name in "abc"], 5)
    assert first == second
    assert first[:3] != first[3:6] or first[:3] != first[6:9]


def test_the_calmest_rounds_are_kept(monkeypatch):
    shares = iter([0.9, 0.0, 0.5, 0.01])
    monkeypatch.setattr(timing.BackgroundLoad, "share", lambda self: next(shares))
    rounds = interleave([Candidate("a", lambda: None, [])], 2, patience=2)
    assert rounds.elsewhere == 0.01


def test_short_rounds_continue_the_interval_of_the_load(monkeypatch):
    loads = []

    def share(load):
        loads.append(load)
        return 0.0

    monkeypatch.setattr(timing.BackgroundLoad, "share", share)
    for num_ranks in (1, 2):
        Ranks(num_ranks).interleave([Candidate("a", lambda: None, [])], 1)
    assert loads[0] is loads[1]


def test_a_round_in_which_the_machine_was_slower_is_not_kept(monkeypatch):
    monkeypatch.setattr(timing.BackgroundLoad, "share", lambda self: 0.0)
    lost = iter([0.3, 0.0, 0.04, 0.2])

    class Meter(Candidate):
        def seconds(self):
            self.lost = next(lost)
            return self.lost

    rounds = interleave([Meter("m", None, [])], 2, patience=4)
    assert rounds.seconds["m"] == [0.0, 0.04]
    assert rounds.elsewhere == 0.04


def test_patience_limits_the_number_of_rounds(monkeypatch):
    monkeypatch.setattr(timing.BackgroundLoad, "share", lambda self: 0.7)
    log = []
    rounds = interleave([recording("a", log)], 2, patience=3)
    assert len(log) == 6
    assert len(rounds.seconds["a"]) == 2
    assert rounds.elsewhere == 0.7


def test_a_carried_result_is_the_operand_of_the_next_call():
    candidate = Candidate(
        "add", lambda x, y: x + y, [jnp.ones(1), jnp.zeros(1)], carry=1
    )
    for _ in range(3):
        result = candidate()
    assert float(result[0]) == 3.0


def test_a_program_runs_with_its_number_of_threads():
    seen = []
    before = _cpu.num_threads()
    program = Candidate("any", lambda: seen.append(_cpu.num_threads()), [])
    rounds = interleave([WithThreads(f"any@{n}", program, n) for n in (3, 5)], 1)
    # Each timed call follows a call that is not timed.
    assert sorted(seen) == [3, 3, 5, 5]
    assert set(rounds.seconds) == {"any@3", "any@5"}
    assert _cpu.num_threads() == before


def test_the_fastest_variant_is_returned():
    log = []
    ways = [
        recording("slow", log, 0.02),
        recording("fast", log),
        recording("late", log, 0.02),
    ]
    assert Timer().fastest(ways) is ways[1]


def test_a_slow_variant_is_dropped_after_one_trial():
    log = []
    Timer().fastest([recording("fast", log, 0.001), recording("hopeless", log, 0.05)])
    assert log.count("hopeless") == 2


def test_a_single_variant_is_not_run():
    log = []
    only = recording("only", log)
    assert Timer().fastest([only]) is only
    assert not log


@pytest.mark.parametrize(("own", "share"), [(0.0, 0.25), (0.5, 0.0)])
def test_the_background_load_excludes_this_job(monkeypatch, own, share):
    now, used = iter([0.0, 1.0]), iter([0.0, own])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    load = BackgroundLoad(lambda: next(used))
    load._psutil = types.SimpleNamespace(cpu_percent=lambda: 25.0)
    assert load.share() == pytest.approx(share)


def test_without_psutil_there_is_no_background_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert BackgroundLoad().share() == 0.0
    with pytest.raises(UnsupportedOverlapError, match="bench requires psutil"):
        report.environment()


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
def test_invalid_arguments_of_the_peak_are_rejected(dtype, duration_s, text):
    with pytest.raises(ValueError, match=text):
        _cpu.peak_gflops(dtype, duration_s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_limit_is_flops_over_the_peak_rate(dtype):
    (candidate,) = peak_candidates("cpu", dtype, 10**9)
    assert candidate.name == timing.PEAK
    assert candidate.seconds() > 0
    candidate.program = lambda *operands: 200.0
    assert candidate.seconds() == pytest.approx(5e-3)


def test_lost_is_the_drop_below_the_best_peak(monkeypatch):
    monkeypatch.setattr(timing, "_best_rates", {})
    (candidate,) = peak_candidates("cpu", "float32", 10**9)
    rates = iter([100.0, 75.0, 200.0])
    candidate.program = lambda *operands: next(rates)
    lost = []
    for _ in range(3):
        candidate.seconds()
        lost.append(candidate.lost)
    assert lost == [0.0, 0.25, 0.0]


def test_there_is_no_peak_without_flops_or_on_gpus():
    assert peak_candidates("cpu", "float32", 0) == []
    assert peak_candidates("gpu", "float32", 8) == []


def test_median_and_best_of_a_series():
    summary = summarize([4.0, 1.0, 2.0])
    assert summary.median == 2.0
    assert summary.best == 1.0


def test_spread_is_the_interquartile_range_over_the_median():
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 3)


def test_one_interrupted_round_moves_neither_median_nor_spread():
    calm = summarize([1.0, 1.0, 1.0, 1.0, 1.0])
    interrupted = summarize([1.0, 1.0, 1.0, 1.0, 50.0])
    assert (calm.median, calm.spread) == (interrupted.median, interrupted.spread)


def test_a_single_round_has_no_spread():
    assert summarize([3.0]) == Summary(3.0, 0.0, 3.0)


def test_ratio_compares_the_same_rounds():
    # In the last two rounds the machine was three times as slow, for both programs.
    found = ratio(peer=[2.0, 2.0, 6.0, 6.0], own=[1.0, 1.0, 3.0, 3.0])
    assert found == Summary(2.0, 0.0, 2.0)


def test_the_best_ratio_is_the_largest():
    assert ratio([1.0, 4.0, 2.0], [1.0, 1.0, 1.0]).best == 4.0
