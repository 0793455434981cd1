import math

import pytest

from tests.bench import goals


def result(op, speedups=None, shares=None, **more):
    def summaries(values):
        return {name: {"median": value} for name, value in (values or {}).items()}

    fixed = {"variant": "", "dtype": "bfloat16", "num_ranks": 2, "num_processes": 1}
    return {
        "op": op,
        "memory": None,
        "times_us": summaries({"jax_ub": 5.0}),
        **fixed,
        "speedups": summaries(speedups),
        "shares": summaries(shares),
        **more,
    }


def forward(best, **more):
    return result("all_gather_matmul", {"xla_best": best, "xla_naive": 3.0}, **more)


def verdicts(results, measure, worst=False):
    found = goals.judge(results)
    return [v for v in found if (v.goal.measure, v.goal.worst) == (measure, worst)]


def test_a_goal_holds_for_the_geometric_mean_over_shapes_or_the_worst_shape():
    results = [forward(2.0), forward(0.9)]
    (mean,) = verdicts(results, "speed-up over xla_best")
    assert mean.value == pytest.approx(math.sqrt(1.8))
    assert mean.outcome == "reached"
    (worst,) = verdicts(results, "speed-up over xla_best", worst=True)
    assert (worst.value, worst.outcome) == (0.9, "NOT reached")


@pytest.mark.parametrize(
    ("speedup", "peak", "outcome"),
    [
        (1.2, 0.8, "beyond this machine"),
        (1.2, 0.7, "NOT reached"),
        (1.7, 1.2, "reached"),
        (1.2, None, "NOT reached"),
    ],
)
def test_a_goal_above_the_speed_up_at_peak_is_beyond_the_machine(
    speedup, peak, outcome
):
    shares = {} if peak is None else {"peak": peak}
    pair = result("linear_pair", {"xla_best": speedup}, shares)
    (found,) = goals.judge([pair])  # the goal is 1.6
    assert found.outcome == outcome
    assert found.limit == (None if peak is None else speedup / peak)


def test_the_gemm_is_compared_with_the_fastest_of_its_peers():
    (found,) = goals.judge([result("gemm", {"xla_best": 2.0, "onednn": 0.9})])
    assert (found.value, found.outcome) == (0.9, "NOT reached")


def test_each_number_of_ranks_is_judged_separately():
    results = [forward(2.0), forward(1.0, num_ranks=4)]
    found = verdicts(results, "speed-up over xla_best")
    assert [v.outcome for v in found] == ["reached", "NOT reached"]


def test_goals_of_several_processes_differ():
    shares = {"in_process": 0.8}
    found = list(goals.judge([forward(1.4, num_processes=2, shares=shares)]))
    assert [(v.goal.measure, v.outcome) for v in found] == [
        ("speed-up over xla_best", "NOT reached"),
        ("time over one process's", "NOT reached"),
    ]
    assert found[1].value == pytest.approx(1.25)


def test_no_allocation_is_the_best_value():
    memory = {"own_bytes": 0, "avoided_bytes": 100}
    (found,) = verdicts([forward(2.0, memory=memory)], "allocated share", worst=True)
    assert (found.value, found.outcome) == (0.0, "reached")


def test_the_table_has_a_row_per_verdict():
    found = list(goals.judge([forward(2.0)]))
    lines = goals.table(found)
    assert len(lines) == 2 + len(found)
    assert "| reached " in lines[2]
