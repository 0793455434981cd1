import jax.numpy as jnp
import pytest

from jax_ub._src.tools.bench import timing
from jax_ub._src.tools.bench.background_load import BackgroundLoad
from jax_ub._src.tools.bench.timing import Candidate, fastest, interleave


class Clock:
    """It goes on by what a program is said to take: no test measures the machine."""

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


def test_every_contender_runs_once_in_each_round():
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


def test_a_round_in_which_the_machine_was_slower_is_not_kept():
    lost = iter([0.3, 0.0, 0.04, 0.2])

    class Meter(Candidate):
        def seconds(self):
            self.lost = next(lost)
            return self.lost

    rounds = interleave([Meter("m", None, [])], 2, patience=4)
    assert rounds.seconds["m"] == [0.0, 0.04]
    assert rounds.elsewhere == 0.04


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(timing.BackgroundLoad, "share", lambda self: 0.7)
    log = []
    rounds = interleave([recording("a", log)], 2, patience=3)
    assert len(log) == 6
    assert len(rounds.seconds["a"]) == 2
    assert rounds.elsewhere == 0.7


def test_a_carried_result_is_the_next_call_s_operand():
    candidate = Candidate(
        "add", lambda x, y: x + y, [jnp.ones(1), jnp.zeros(1)], carry=1
    )
    for _ in range(3):
        result = candidate()
    assert float(result[0]) == 3.0


def test_the_fastest_way_is_found():
    log = []
    ways = [
        recording("slow", log, 0.02),
        recording("fast", log),
        recording("late", log, 0.02),
    ]
    assert fastest(ways) is ways[1]


def test_a_hopeless_way_is_not_tried_again():
    log = []
    fastest([recording("fast", log, 0.001), recording("hopeless", log, 0.05)])
    assert log.count("hopeless") == 2


def test_one_way_needs_no_trial():
    log = []
    only = recording("only", log)
    assert fastest([only]) is only
    assert not log


def test_what_runs_elsewhere_is_what_this_process_did_not_use(tmp_path, monkeypatch):
    statistics = tmp_path / "stat"
    statistics.write_text("cpu 100 0 100 900 0 0 0 0 0 0\n")
    clock = iter([0.0, 1.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    others = BackgroundLoad(statistics)
    # One second of 100 ticks on two cores, of which half a core was busy.
    statistics.write_text("cpu 130 0 120 1050 0 0 0 0 0 0\n")
    assert others.share() == pytest.approx(0.25)


def test_what_a_job_used_is_not_elsewhere(tmp_path, monkeypatch):
    statistics = tmp_path / "stat"
    statistics.write_text("cpu 100 0 100 900 0 0 0 0 0 0\n")
    clock, own = iter([0.0, 1.0]), iter([0.0, 0.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    others = BackgroundLoad(statistics, own_seconds=lambda: next(own))
    statistics.write_text("cpu 130 0 120 1050 0 0 0 0 0 0\n")
    assert others.share() == 0.0


def test_without_linux_s_statistics_nothing_runs_elsewhere(tmp_path):
    assert BackgroundLoad(tmp_path / "absent").share() == 0.0
