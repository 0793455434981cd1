"""Schedules as Python sees them: properties over all ranks at once, no arrays."""

import pytest

from jax_ub import _cpu

MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
CASES = [
    *((op, m) for op in MATMULS for m in ("direct", "ring_exchange", "pipeline")),
    *((op, "external") for op in MATMULS + COLLECTIVES),
    *((op, m) for op in COLLECTIVES for m in ("ring_exchange", "pipeline", "bulk")),
    ("bulk_all_gather", "bulk"),
    ("bulk_reduce_scatter", "bulk"),
]
RANKS = (1, 2, 3, 4, 5, 8, 16)  # schedule_test.cc checks all


def every_rank(op, method, num_ranks, num_splits=2, variant="plain"):
    return [
        _cpu.schedule(op, method, rank, num_ranks, num_splits, variant)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("op", "method"), CASES)
def test_the_checker_proves_it_for_one_to_sixteen_ranks(op, method):
    for num_ranks in RANKS:
        assert _cpu.check_schedule(op, method, num_ranks, 1 + num_ranks % 3) == []


@pytest.mark.parametrize(("op", "method"), CASES)
def test_every_put_has_one_wait(op, method):
    for num_ranks in RANKS:
        sent, awaited = [], []
        for rank, steps in enumerate(every_rank(op, method, num_ranks)):
            for step in steps:
                piece = (step.payload, step.chunk, step.split, step.slot)
                if step.kind in ("put", "publish"):
                    sent.append((rank, step.peer, *piece))
                if step.kind == "wait":
                    awaited.append((step.peer, rank, *piece))
        assert sorted(sent) == sorted(awaited)
        assert len(set(sent)) == len(sent)


@pytest.mark.parametrize(("op", "method"), CASES)
def test_all_ranks_do_the_same_number_of_each_step(op, method):
    for num_ranks in RANKS:
        counts = {
            tuple(sorted(step.kind for step in steps))
            for steps in every_rank(op, method, num_ranks)
        }
        assert len(counts) == 1


@pytest.mark.parametrize("method", ["ring_exchange", "pipeline"])
def test_a_gather_multiplies_its_own_rows_first_and_a_scatter_last(method):
    for num_ranks in RANKS:
        for rank in range(num_ranks):
            gather = _cpu.schedule("all_gather_matmul", method, rank, num_ranks, 1)
            scatter = _cpu.schedule("matmul_reduce_scatter", method, rank, num_ranks, 1)
            first = next(s for s in gather if s.kind == "multiply")
            last = [s for s in scatter if s.kind == "multiply"][-1]
            assert (first.chunk, last.chunk) == (rank, rank)


def test_a_ring_sends_a_chunk_on_before_it_multiplies_it():
    steps = _cpu.schedule("all_gather_matmul", "ring_exchange", 0, 4, 1)
    order = [(s.kind, s.chunk) for s in steps if s.kind in ("put", "multiply")]
    assert order == [
        ("put", 0),
        ("multiply", 0),
        ("put", 3),
        ("multiply", 3),
        ("put", 2),
        ("multiply", 2),
        ("multiply", 1),
    ]


def test_more_splits_are_more_and_smaller_transfers():
    for num_splits in (1, 2, 5):
        steps = _cpu.schedule("all_gather_matmul", "pipeline", 1, 3, num_splits)
        multiplied = {(s.chunk, s.split) for s in steps if s.kind == "multiply"}
        assert multiplied == {(c, s) for c in range(3) for s in range(num_splits)}


def test_a_step_says_what_it_is():
    step = _cpu.schedule("all_gather", "bulk", 0, 2, 1)[1]
    assert repr(step) == (
        "Step(kind='put', payload='operand', chunk=0, split=0, peer=1, slot=0, "
        "num_chunks=1)"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all_gather_matmul", "bulk", 0, 2, 1), "has no method bulk"),
        (("all_gather_matmull", "bulk", 0, 2, 1), "op 'all_gather_matmull' is none of"),
        (("all_gather", "rings", 0, 2, 1), "method 'rings' is none of direct, ring"),
        (("all_gather", "bulk", 2, 2, 1), "rank 2 is none of 2"),
        (("all_gather", "bulk", 0, 0, 1), "num_ranks is 0"),
        (("all_gather", "pipeline", 0, 2, 0), "num_splits is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        _cpu.schedule(*arguments)


def test_a_ring_of_pairs_is_proven_and_multiplies_every_chunk_once():
    for num_ranks in range(2, 17, 2):
        kind = ("all_gather_matmul", "ring_exchange", num_ranks)
        assert _cpu.check_schedule(*kind, 1, "aggregate") == []
        for steps in every_rank(*kind, variant="aggregate"):
            products = [step for step in steps if step.kind == "multiply"]
            assert [p.num_chunks for p in products] == [1, 1] + [2] * (
                num_ranks // 2 - 1
            )
            chunks = [p.chunk + i for p in products for i in range(p.num_chunks)]
            assert sorted(chunks) == list(range(num_ranks))
            # As many chunks are sent as in the plain ring.
            assert sum(step.kind == "put" for step in steps) == num_ranks - 1


def test_a_variant_that_a_schedule_has_not_is_refused():
    with pytest.raises(ValueError, match="of 3 ranks has no variant aggregate"):
        _cpu.schedule("all_gather_matmul", "ring_exchange", 0, 3, 1, "aggregate")
    with pytest.raises(ValueError, match="variant 'pairs' is none of plain, "):
        _cpu.schedule("all_gather_matmul", "ring_exchange", 0, 4, 1, "pairs")


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_late_put_follows_the_next_product(op):
    for num_ranks in RANKS:
        kind = (op, "pipeline", num_ranks, 3)
        assert _cpu.check_schedule(*kind, "overlap_first_gemm") == []
        for steps in every_rank(*kind, "overlap_first_gemm"):
            begun = []
            for step in steps:
                if step.kind == "multiply":
                    begun.append((step.chunk, step.split))
                if step.kind == "put" and step.payload == "partial":
                    assert begun[-2] == (step.chunk, step.split)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_reduce"])
def test_one_exchange_is_proven_and_sends_everything_to_all(op):
    for num_ranks in RANKS:
        kind = (op, "ring_exchange", num_ranks, 1)
        assert _cpu.check_schedule(*kind, "one_shot") == []
        for rank, steps in enumerate(every_rank(*kind, "one_shot")):
            peers = [step.peer for step in steps if step.kind == "put"]
            assert sorted([*peers, rank]) == list(range(num_ranks))
            assert {step.chunk for step in steps if step.kind in ("put", "reduce")} == {
                -1
            }
