import numpy as np
import pytest

from jax_ub._src.tools.bench.devices import Ranks
from jax_ub._src.tools.bench.dots import LAYOUTS, DotVariant, FastestDots, naive, ways
from jax_ub._src.tools.bench.gemm_cases import local_shapes
from jax_ub._src.tools.bench.workloads import Shape
from tests.operands import assert_equal, small_integers

SHAPE = Shape(6, 4, 5)


def operands(layout, dtype):
    left, right, _ = local_shapes(layout, SHAPE)
    return small_integers(0, left, dtype), small_integers(1, right, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_to_write_a_dot_gives_the_same(layout, dtype):
    a, b = operands(layout, dtype)
    wanted = naive(a, b, layout)
    assert wanted.shape == local_shapes(layout, SHAPE)[2]
    for way in ways(layout, dtype):
        assert_equal(way(a, b, dtype), wanted)


def test_the_ways_differ_in_words():
    words = [str(way) for way in ways("tn", "bfloat16")]
    assert words[0] == "plain dot"
    assert len(set(words)) == len(words)


def test_a_gpu_is_not_asked_for_ways_that_only_cpus_need():
    words = [str(way) for way in ways("nt", "bfloat16", "gpu")]
    assert words == ["plain dot", "f32 result"]


def test_a_dot_rounds_to_the_dtype_that_is_asked_for():
    a, b = operands("nn", "bfloat16")
    assert DotVariant("nn")(a, b, "float32").dtype == np.float32


def test_the_fastest_way_is_measured_once():
    dots, ranks = FastestDots(), Ranks(2)
    found = dots("nn", "float32", (8, 16), (16, 8), ranks)
    assert dots("nn", "float32", (8, 16), (16, 8), ranks) is found
    assert dots.found == {"nn float32 (8, 16) (16, 8) on 2": str(found)}
