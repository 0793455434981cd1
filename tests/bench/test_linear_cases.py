"""The backward alone: what it runs, and that all of its programs agree."""

import pytest

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import Place, check_agreement
from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.dots import FastestDots
from jax_ub._src.tools.bench.linear_cases import linear_backward
from jax_ub._src.tools.bench.workloads import Shape


@pytest.fixture
def backward():
    place = Place(Ranks(2), "float32", "auto", FastestDots())
    (case,) = linear_backward(place, Shape(32, 48, 80))
    return case


def test_the_forward_of_neither_layer_runs(backward):
    own = next(c for c in backward.candidates if c.name == cases.OWN)
    text = own.program.lower(*own.operands).compile().as_text()
    # Two gradients of each layer, with all communication inside.
    assert text.count('custom_call_target="jax_ub$') == 4
    assert "all-gather" not in text
    assert "reduce-scatter" not in text


def test_every_program_has_the_same_results(backward):
    check_agreement(backward)
