import pytest

from jax_ub._src.tools.bench.workloads import DEFAULT, Shape, parse_shape
from jax_ub.errors import ShapeContractError


def test_a_shape_reads_what_it_writes():
    assert parse_shape(str(Shape(512, 1024, 2816))) == Shape(512, 1024, 2816)


@pytest.mark.parametrize("text", ["3x4", "", "axbxc", "8x0x8", "8x8x8x8", "-8x8x8"])
def test_other_texts_are_refused(text):
    with pytest.raises(ShapeContractError, match="is not MxKxN with positive sizes"):
        parse_shape(text)


def test_flops_and_bytes_of_a_gemm():
    shape = Shape(2, 3, 5)
    assert shape.flops == 60
    assert shape.bytes(4) == 4 * (2 * 3 + 3 * 5 + 2 * 5)


def test_the_row_linear_turns_the_column_linear_around():
    assert Shape(2, 3, 5).row == Shape(2, 5, 3)


def test_the_default_shapes_divide_and_are_enough_for_a_geometric_mean():
    assert len(DEFAULT) >= 3
    assert all(
        shape.divides(num_ranks) for shape in DEFAULT for num_ranks in (1, 2, 4, 8)
    )
    assert not Shape(12, 8, 8).divides(8)
