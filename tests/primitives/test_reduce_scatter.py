import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from operands import (
    DTYPES,
    RANK_COUNTS,
    assert_close,
    assert_equal,
    normal,
    small_integers,
)
from programs import (
    calls,
    collectives,
    compiled_text,
    execution,
    on_ranks,
    tp_mesh,
)

from jax_ub._src.methods import Method
from jax_ub._src.primitives.collectives import reduce_scatter


def run(num_ranks, method, out_dtype="float32"):
    def function(x):
        return reduce_scatter(execution(method, num_ranks), x, out_dtype=out_dtype)

    specs = (P(None, None, "tp"),)
    return on_ranks(function, tp_mesh(num_ranks), specs, P(None, "tp"))


@covering(num_ranks=RANK_COUNTS, dtype=DTYPES)
def test_is_exact_on_small_integers(num_ranks, dtype):
    x = small_integers(0, (2, 3 * num_ranks, 7 * num_ranks), dtype)
    for out_dtype in dict.fromkeys((dtype, "float32")):
        expected = run(num_ranks, Method.XLA, out_dtype)(x)
        assert_equal(run(num_ranks, Method.DIRECT, out_dtype)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_f32_and_rounds_once(dtype):
    x = normal(0, (1, 16, 8 * 5), dtype)
    expected = run(8, Method.XLA, dtype)(x)
    assert_close(run(8, Method.DIRECT, dtype)(x), expected, 8)


def test_is_one_call_and_no_collective():
    text = compiled_text(run(4, Method.AUTO), normal(0, (1, 4, 12)))
    assert calls(text) == {"reduce_scatter": 1}
    assert not collectives(text)
