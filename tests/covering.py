"""Marks parameters `matrix`: the default run takes a sample that covers them."""

import itertools
from collections.abc import Iterable

import pytest


def nightly(*values):
    """Returns values of a parameter that only the nightly run takes."""
    return [pytest.param(value, marks=pytest.mark.matrix) for value in values]


def covering(strength: int = 1, **values: Iterable):
    """Parametrizes a test by the product of `values`.

    The default run takes a sample of the product, the nightly run takes all of it.

    Args:
        strength: with 1, every value is in the sample; with 2, every pair of values of
            two parameters.
        **values: the values of each parameter.
    """
    return pytest.mark.parametrize(tuple(values), product(strength, *values.values()))


def product(strength: int, *columns: Iterable):
    """Returns the product of `columns` as parameters, of which a sample is unmarked."""
    lists = list(map(list, columns))
    sample = _sample([range(len(values)) for values in lists], strength)
    return [
        pytest.param(*case, marks=() if number in sample else pytest.mark.matrix)
        for number, case in enumerate(itertools.product(*lists))
    ]


def _sample(columns, strength):
    """Returns the numbers of cases that together have all combinations of values."""
    cases = itertools.product(*columns)
    covered = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    missing = set().union(*covered)
    sample: set[int] = set()
    while missing:
        best = max(
            range(len(covered)), key=lambda number: len(covered[number] & missing)
        )
        missing -= covered[best]
        sample.add(best)
    return sample
