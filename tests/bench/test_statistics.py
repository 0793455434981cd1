import math

import pytest

from jax_ub._src.tools.bench.statistics import Summary, geomean, ratio, summarize


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


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="empty series has no median. Run a round"):
        summarize([])


def test_ratio_compares_the_same_rounds():
    # The machine slowed down threefold for the last two rounds, for both alike.
    found = ratio(peer=[2.0, 2.0, 6.0, 6.0], own=[1.0, 1.0, 3.0, 3.0])
    assert found == Summary(2.0, 0.0, 2.0)


def test_the_best_ratio_is_the_largest():
    assert ratio([1.0, 4.0, 2.0], [1.0, 1.0, 1.0]).best == 4.0


def test_ratio_refuses_series_of_other_rounds():
    with pytest.raises(ValueError, match="2 and 1 rounds cannot be compared"):
        ratio([1.0, 1.0], [1.0])


def test_geomean_treats_twice_and_half_alike():
    assert geomean([2.0, 0.5]) == pytest.approx(1.0)
    assert geomean([1.0, 2.0, 4.0]) == pytest.approx(2.0)
    assert math.isclose(geomean([1.3]), 1.3)


def test_geomean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="there are no values. Run at least one case"):
        geomean([])
