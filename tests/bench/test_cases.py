import pytest

from jax_ub._src.tools.bench import cases
from jax_ub._src.tools.bench.cases import (
    DEFAULT_SHAPES,
    Setup,
    Shape,
    check_agreement,
    parse_shape,
    tolerance,
)
from jax_ub._src.tools.bench.gemm import gemm
from jax_ub._src.tools.bench.machine import Ranks
from jax_ub.errors import ShapeContractError


def test_a_shape_is_parsed_from_its_text():
    assert parse_shape(str(Shape(512, 1024, 2816))) == Shape(512, 1024, 2816)


@pytest.mark.parametrize("text", ["3x4", "", "axbxc", "8x0x8", "8x8x8x8", "-8x8x8"])
def test_malformed_shapes_are_rejected(text):
    with pytest.raises(ShapeContractError, match="is not MxKxN with positive sizes"):
        parse_shape(text)


def test_flops_and_bytes_of_a_gemm():
    shape = Shape(2, 3, 5)
    assert shape.flops == 60
    assert shape.bytes("float32") == 4 * (2 * 3 + 3 * 5 + 2 * 5)


def test_the_row_linear_swaps_the_features_of_the_column_linear():
    assert Shape(2, 3, 5).row == Shape(2, 5, 3)


def test_at_least_three_default_shapes_divide_into_eight_ranks():
    assert len(DEFAULT_SHAPES) >= 3
    assert all(
        shape.divides(num_ranks)
        for shape in DEFAULT_SHAPES
        for num_ranks in (1, 2, 4, 8)
    )
    assert not Shape(12, 8, 8).divides(8)


def test_programs_that_disagree_are_an_error():
    setup = Setup(Ranks(1), "float32", "auto", None, ("nn",))
    (case,) = gemm(setup, Shape(8, 8, 8))
    check_agreement(case)
    own = case[cases.OWN]
    program = own.program
    own.program = lambda *operands: 1.01 * program(*operands)
    with pytest.raises(ArithmeticError, match="jax_ub differs from xla_best by"):
        check_agreement(case)


def test_the_tolerance_follows_the_dtype_and_the_length_of_the_sums():
    assert tolerance("bfloat16", 64) > tolerance("float32", 64)
    assert tolerance("float32", 4096) > tolerance("float32", 64)
