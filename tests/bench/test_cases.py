import dataclasses

import pytest

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import (
    DEFAULT_SHAPES,
    Setup,
    check_agreement,
    tolerance,
)
from jax_ub._src.tools.bench.gemm import local
from jax_ub._src.tools.bench.linear import Chain
from jax_ub._src.tools.command_line import Shape
from jax_ub._src.tools.devices import Ranks
from jax_ub._src.tools.timing import Candidate


def test_at_least_three_default_shapes_divide_into_eight_ranks():
    assert len(DEFAULT_SHAPES) >= 3
    assert all(
        shape.divides(num_ranks)
        for shape in DEFAULT_SHAPES
        for num_ranks in (1, 2, 4, 8)
    )
    assert not Shape(12, 8, 8).divides(8)


def test_programs_that_disagree_are_an_error():
    setup = Setup(Ranks(1), "float32", ("nn",))
    (case,) = local("gemm", setup, Shape(8, 8, 8))
    check_agreement(case)
    own = case[cases.OWN]
    program = own.program
    own.program = lambda *operands: 1.01 * program(*operands)
    with pytest.raises(ArithmeticError, match="jax_ub differs from xla_best by"):
        check_agreement(case)


def test_programs_that_quantize_within_a_call_may_differ_by_the_rounding_to_fp8():
    setup = Setup(Ranks(1), "float32", ("nn",))
    (case,) = local("gemm", setup, Shape(8, 8, 8))
    own = case[cases.OWN]
    program = own.program
    own.program = lambda *operands: 1.08 * program(*operands)
    check_agreement(dataclasses.replace(case, fp8_rounding=0.125))
    own.program = lambda *operands: 1.1 * program(*operands)
    with pytest.raises(ArithmeticError, match="jax_ub differs from xla_best by"):
        check_agreement(dataclasses.replace(case, fp8_rounding=0.125))


def test_the_tolerance_follows_the_dtype_and_the_length_of_the_sums():
    assert tolerance("bfloat16", 64) > tolerance("float32", 64)
    assert tolerance("float32", 4096) > tolerance("float32", 64)


@pytest.mark.parametrize(("once_s", "call_s"), [(0.5, 5e-3), (2.0, 1e-11)])
def test_the_time_of_a_chain_is_the_difference_over_the_calls(
    monkeypatch, once_s, call_s
):
    programs_s = {"chain": 1.0, "once": once_s}
    monkeypatch.setattr(Candidate, "seconds", lambda self: programs_s[self.program])
    once = Candidate("jax_ub", "once", [])
    chain = Chain("jax_ub", "chain", [], once=once)
    assert chain.seconds() == pytest.approx(call_s)
