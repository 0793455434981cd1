"""The table of parallel modes, compared with what the ops do."""

import itertools

import pytest
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src.config.flags import NAMES, flags_of
from jax_ub._src.parallel import MODES, PARALLEL, PASSES, check_parallel, mode_of


def test_every_combination_of_the_two_options_has_a_row():
    options = set(itertools.product((None, *PARALLEL), (True, False)))
    assert set(MODES) == options
    assert all((m.parallel, m.sequence_parallel) == key for key, m in MODES.items())


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda m: m.op)
def test_a_sharded_contraction_needs_a_reduction(mode):
    # x's features and the kernel's "in" are the same dimension, as are the kernel's
    # "out" and y's features.
    assert mode.x[1] == mode.kernel[0]
    assert mode.y[1] == mode.kernel[1]
    reduces = "reduce" in mode.op
    assert reduces == mode.kernel[0]
    # Only an all-gather or a reduce-scatter changes which tokens a rank has.
    changes_tokens = mode.op in ("all_gather_matmul", "matmul_reduce_scatter")
    assert changes_tokens == (mode.x[0] != mode.y[0])


def test_every_function_of_the_table_is_public():
    assert all(callable(getattr(ub, mode.function_name)) for mode in MODES.values())


def test_every_flag_belongs_to_one_pass_of_a_mode():
    flags = [flags_of(mode_of(parallel, True)) for parallel in PARALLEL]
    assert set(itertools.chain(*flags)) == set(NAMES)
    assert not any(flags_of(m) for m in MODES.values() if not m.sequence_parallel)
    assert flags_of(mode_of("row", True), PASSES[1:2]) == ("ub_overlap_ag",)


def test_kernel_specs_put_the_other_axes_into_the_first_free_dimension():
    specs = {
        (parallel, other): mode_of(parallel, True).kernel_spec("tp", other)
        for parallel in (None, *PARALLEL)
        for other in (None, "fsdp")
    }
    assert specs == {
        (None, None): P(None, None),
        (None, "fsdp"): P("fsdp", None),
        ("column", None): P(None, "tp"),
        ("column", "fsdp"): P("fsdp", "tp"),
        ("row", None): P("tp", None),
        ("row", "fsdp"): P("tp", "fsdp"),
    }


def test_an_unknown_mode_is_rejected_with_the_nearest_one():
    with pytest.raises(ub.errors.UnknownNameError, match="mean 'column'"):
        check_parallel("linear", "parallel", "colum")
