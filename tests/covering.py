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
        **values: the values of each parameter. The sample has no value of `nightly`.
    """
    return pytest.mark.parametrize(tuple(values), product(strength, *values.values()))


def product(strength: int, *columns: Iterable):
    """Returns the product of `columns` as parameters, of which a sample is unmarked."""
    params = [[_param(value) for value in values] for values in columns]
    unmarked = [[i for i, p in enumerate(column) if not p.marks] for column in params]
    sample = _sample(unmarked, strength)
    return [
        pytest.param(
            *(column[i].values[0] for column, i in zip(params, case, strict=True)),
            marks=() if case in sample else pytest.mark.matrix,
        )
        for case in itertools.product(*(range(len(column)) for column in params))
    ]


def _param(value):
    """Returns a value of a parameter as `pytest.param` does."""
    is_param = isinstance(value, type(pytest.param()))
    return value if is_param else pytest.param(value)


def _sample(columns, strength):
    """Returns cases that together have all combinations of values of `columns`."""
    cases = list(itertools.product(*columns))
    covered = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    missing = set().union(*covered)
    sample = set()
    while missing:
        best = max(
            range(len(covered)), key=lambda number: len(covered[number] & missing)
        )
        missing -= covered[best]
        sample.add(cases[best])
    return sample
