import pytest

from jax_ub._src.tools.bench import cases, goals
from jax_ub._src.tools.bench.cases import Case, Memory
from jax_ub._src.tools.bench.results import evaluate
from jax_ub._src.tools.bench.timing import Rounds
from jax_ub._src.tools.bench.workloads import Shape


def result(
    op, seconds, *, dtype="bfloat16", num_ranks=2, variant="", memory=None, calls=1
):
    shape = Shape(8, 16, 32)
    case = Case(op, variant, dtype, num_ranks, shape, shape.flops, [], calls, memory)
    return evaluate(case, Rounds({k: list(v) for k, v in seconds.items()}, 0.0))


def forward(own, best, peak=None, **more):
    times = {
        cases.OWN: [own],
        cases.BEST: [best],
        cases.NAIVE: [3 * own],
        cases.PLAIN: [own],
        cases.LAUNCH: [0.1 * own],
        cases.LAUNCH_ONE: [0.1 * own],
        **({} if peak is None else {cases.PEAK: [peak]}),
    }
    memory = Memory(0, 100, "the gathered x", 100, 0)
    return result("all_gather_matmul", times, memory=memory, **more)


def verdict(verdicts, measure, statistic="geomean"):
    (found,) = [v for v in verdicts if (v.measure, v.statistic) == (measure, statistic)]
    return found


def test_a_goal_takes_the_geometric_mean_over_shapes_and_the_worst_of_them():
    verdicts = goals.judge([forward(1.0, 2.0), forward(1.0, 0.9)])
    mean = verdict(verdicts, "speed-up over xla_best")
    assert mean.value == pytest.approx(1.8**0.5)
    assert mean.reached
    assert mean.num_shapes == 2
    worst = verdict(verdicts, "speed-up over xla_best", "worst")
    assert worst.value == pytest.approx(0.9)
    assert not worst.reached


def at_peak(own, best, peak, **more):
    times = {cases.OWN: [own], cases.BEST: [best], cases.PEAK: [peak]}
    return result("linear_pair", times, **more)


def test_a_goal_beyond_the_limit_is_called_so():
    # The goal is 1.6.
    (found,) = goals.judge([at_peak(1.0, 1.2, peak=0.8)])
    assert found.limit == pytest.approx(1.5)
    assert found.outcome == "beyond this machine"
    (found,) = goals.judge([at_peak(1.0, 1.2, peak=0.7)])
    assert found.limit == pytest.approx(1.2 / 0.7)
    assert found.outcome == "NOT reached"
    assert goals.as_json(found)["outcome"] == "NOT reached"
    assert goals.as_json(found)["limit"] == found.limit


def test_what_is_reached_is_reached_whatever_the_limit_is():
    (found,) = goals.judge([at_peak(1.0, 1.7, peak=1.2)])
    assert found.limit < found.bound
    assert found.outcome == "reached"


def test_a_limit_compares_the_peak_and_the_peer_of_the_same_rounds():
    # The second round has half of a machine, and twice the peak's time.
    times = {
        cases.OWN: [1.0, 2.0, 1.1],
        cases.BEST: [1.2, 2.4, 1.32],
        cases.PEAK: [0.8, 1.6, 0.88],
    }
    (found,) = goals.judge([result("linear_pair", times)])
    assert found.limit == pytest.approx(1.5)


def test_a_limit_is_summarized_as_its_figure_is():
    verdicts = goals.judge([forward(1.0, 2.0, peak=0.8), forward(1.0, 0.9, peak=0.9)])
    mean = verdict(verdicts, "speed-up over xla_best")
    assert mean.limit == pytest.approx((2.0 / 0.8 * 0.9 / 0.9) ** 0.5)
    worst = verdict(verdicts, "speed-up over xla_best", "worst")
    assert worst.limit == pytest.approx(0.9 / 0.9)
    naive = verdict(verdicts, "speed-up over xla_naive")
    assert naive.limit == pytest.approx(3 / (0.8 * 0.9) ** 0.5)


def test_the_limit_over_several_peers_is_that_over_the_fastest():
    times = {
        cases.OWN: [1.0],
        cases.BEST: [2.0],
        cases.ONEDNN: [0.9],
        cases.PEAK: [0.5],
    }
    (found,) = goals.judge([result("gemm", times, num_ranks=1, variant="nn")])
    assert found.limit == pytest.approx(0.9 / 0.5)


def test_figures_without_a_peer_have_no_limit():
    verdicts = goals.judge([forward(1.0, 2.0, num_ranks=8, peak=0.8)])
    without = {v.measure for v in verdicts if v.limit is None}
    assert without == {
        "time over the plain GEMM's",
        "the same, launches apart",
        "allocated of what need not be",
    }


def test_without_a_peak_there_is_no_limit():
    (found,) = goals.judge(
        [result("linear_pair", {cases.OWN: [1.0], cases.BEST: [1.2]})]
    )
    assert found.limit is None
    assert found.outcome == "NOT reached"


def test_groups_of_another_p_are_judged_apart():
    verdicts = goals.judge([forward(1.0, 2.0), forward(1.0, 1.0, num_ranks=8)])
    best = [v for v in verdicts if v.measure == "speed-up over xla_best"]
    assert {(v.num_ranks, v.reached) for v in best} == {
        (2, True),
        (8, False),
        (8, True),
    }


def test_f32_has_a_goal_of_its_own():
    verdicts = goals.judge([forward(1.0, 1.2, dtype="float32")])
    assert verdict(verdicts, "speed-up over xla_best").bound == 1.1
    assert not [v for v in verdicts if v.measure == "speed-up over xla_naive"]


def test_one_rank_has_no_goal_of_communication():
    assert not goals.judge([forward(1.0, 0.1, num_ranks=1)])


def test_the_gemm_is_held_against_the_fastest_of_its_peers():
    times = {cases.OWN: [1.0], cases.BEST: [2.0], cases.ONEDNN: [0.9]}
    (found,) = goals.judge([result("gemm", times, num_ranks=1, variant="nn")])
    assert found.value == pytest.approx(0.9)
    assert not found.reached


def test_less_is_better_where_time_is_bounded():
    times = {cases.OWN: [1.02], cases.BEST: [1.0], cases.PLAIN: [1.0]}
    (found,) = goals.judge([result("dgrad_add", times)])
    assert found.at_most
    assert found.reached


def test_the_plain_gemm_is_compared_with_launches_and_without():
    times = {
        cases.OWN: [1.5, 3.0, 1.5],
        cases.BEST: [2.0, 4.0, 2.0],
        cases.NAIVE: [2.0, 4.0, 2.0],
        cases.PLAIN: [1.1, 2.2, 1.1],
        cases.LAUNCH: [0.3, 0.6, 0.3],
        cases.LAUNCH_ONE: [0.1, 0.2, 0.1],
    }
    found = result("matmul_all_reduce", times, num_ranks=8)
    verdicts = goals.judge([found])
    over = verdict(verdicts, "time over the plain GEMM's")
    assert over.value == pytest.approx(1.5 / 1.1)
    apart = verdict(verdicts, "the same, launches apart")
    assert apart.value == pytest.approx(1.2 / 1.0)


def test_what_a_program_allocates_is_judged():
    verdicts = goals.judge([forward(1.0, 2.0)])
    assert verdict(verdicts, "allocated of what need not be", "worst").reached


def test_the_time_of_a_call_is_the_difference_over_the_calls():
    times = {
        cases.OWN: [1.0e-3, 1.1e-3],
        f"{cases.OWN}_once": [0.5e-3, 0.6e-3],
        cases.BEST: [3.5e-3, 3.5e-3],
        f"{cases.BEST}_once": [0.5e-3, 0.5e-3],
    }
    found = result("latency", times, variant="all_reduce", calls=100)
    assert found.own.median == pytest.approx(5.0)
    assert found.speedups[cases.BEST].median == pytest.approx(6.0)
    (judged,) = goals.judge([found])
    assert judged.reached
