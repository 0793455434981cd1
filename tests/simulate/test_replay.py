"""Schedules replayed with a cost model: against formulas, and against each other."""

import dataclasses

import pytest

from jax_ub._src.methods import Variant
from jax_ub._src.tools.simulate import hardware, plan, replay, schedules
from jax_ub._src.tools.simulate.replay import PlanOptions
from jax_ub._src.tools.simulate.workload import Workload

# One processor that takes every chunk as one kernel: nothing is quantised.
SMOOTH = dataclasses.replace(
    hardware.host(1e12, 1e11),
    name="smooth",
    processors=1,
    launch_s=0.0,
    handshake_s=3e-6,
)
METHODS = ("direct", "ring_exchange", "pipeline", "external")
PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def times(workload, machine, method="ring_exchange", knobs=None, **which):
    return plan.timeline(workload, machine, method, knobs or PlanOptions(), **which)


def chunk_times(workload, machine):
    rows = workload.piece_rows(1)
    gemm_s = workload.gemm_of(rows).flops / machine.flops_per_s
    wire_s = workload.wire_bytes("operand", rows) / machine.copy_bytes_per_s
    return gemm_s, wire_s


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rate", [1e11, 1e12, 1e13, 1e14])
def test_a_ring_of_all_gather_matmul_is_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    # Sizes of whole tiles.
    work = Workload(
        "all_gather_matmul", 256 * num_ranks, 512, 256 * num_ranks, num_ranks
    )
    gemm_s, wire_s = chunk_times(work, machine)
    shard = 256 * 512 * 2
    first = 2 * shard / machine.memory_bytes_per_s + machine.handshake_s
    # Where a chunk's wire time is within that of its GEMM, at most the first put shows.
    others = num_ranks - 1
    assert times(work, machine).seconds == pytest.approx(
        max(
            num_ranks * gemm_s,
            first + wire_s + others * gemm_s,
            first + others * wire_s + gemm_s,
        )
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rate", [1e11, 1e12, 1e13, 1e14])
def test_a_ring_of_matmul_reduce_scatter_is_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    work = Workload(
        "matmul_reduce_scatter", 256 * num_ranks, 512 * num_ranks, 256, num_ranks
    )
    gemm_s, wire_s = chunk_times(work, machine)
    sum_s = work.reduce_bytes(256) / machine.memory_bytes_per_s
    # The own chunk comes last: each part is put when it is done.
    others = num_ranks - 1
    arrived = max(others * gemm_s + wire_s, gemm_s + others * wire_s)
    assert times(work, machine).seconds == pytest.approx(
        max(num_ranks * gemm_s, arrived + machine.handshake_s) + sum_s
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("rate", [1e11, 1e12, 1e13, 1e14])
def test_an_all_reduce_in_one_exchange_is_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    work = Workload(
        "matmul_all_reduce", 256 * num_ranks, 512 * num_ranks, 256, num_ranks
    )
    gemm_s = work.gemm.flops / machine.flops_per_s
    wire_s = work.wire_bytes("partial", work.M) / machine.copy_bytes_per_s
    sum_s = work.reduce_bytes(work.M) / machine.memory_bytes_per_s
    found = times(work, machine, variant=Variant.ONE_SHOT)
    # Everything goes to each peer, and is added up there.
    assert found.seconds == pytest.approx(
        gemm_s + (num_ranks - 1) * wire_s + machine.handshake_s + sum_s
    )
    sent = [span for span in found.spans if span.kind == "put"]
    assert len(sent) * wire_s == pytest.approx(
        work.one_shot_bytes / machine.copy_bytes_per_s
    )


@pytest.mark.parametrize("name", hardware.HARDWARE)
@pytest.mark.parametrize(
    ("op", "method", "variant"),
    [
        ("all_gather_matmul", "ring_exchange", Variant.AGGREGATE),
        ("matmul_reduce_scatter", "pipeline", Variant.OVERLAP_FIRST_GEMM),
        ("matmul_all_reduce", "pipeline", Variant.OVERLAP_FIRST_GEMM),
        ("matmul_all_reduce", "ring_exchange", Variant.ONE_SHOT),
        ("all_reduce", "ring_exchange", Variant.ONE_SHOT),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_rank_stands_for_all_in_every_variant(name, op, method, variant, num_ranks):
    machine = hardware.find(name)
    work = Workload(op, 768 * num_ranks, 512 * num_ranks, 256 * num_ranks, num_ranks)
    knobs = PlanOptions(num_splits=3 if method == "pipeline" else 1, streams=2)
    alone = times(work, machine, method, knobs, variant=variant)
    together = times(work, machine, method, knobs, variant=variant, every_rank=True)
    assert alone.seconds == pytest.approx(together.seconds)


def test_pairs_of_chunks_are_one_kernel():
    work = Workload("all_gather_matmul", 4096, 4096, 4096, 8)
    spans = times(work, hardware.find("h200"), variant=Variant.AGGREGATE).spans
    gemms = [span.chunks for span in spans if span.kind == "multiply"]
    assert gemms == [(0,), (1,), (6, 7), (4, 5), (2, 3)]


def test_a_later_put_matters_where_a_rank_does_one_thing_at_a_time():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    for name in ("cpu", "h200"):
        machine = hardware.find(name)
        plain, late = (
            times(work, machine, "pipeline", variant=variant).spans
            for variant in (Variant.PLAIN, Variant.OVERLAP_FIRST_GEMM)
        )
        puts = [
            min(span.start_s for span in spans if span.kind == "put")
            for spans in (plain, late)
        ]
        assert (puts[0] == puts[1]) == (name == "h200")


@pytest.mark.parametrize("name", hardware.HARDWARE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("op", PATTERNS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_one_rank_stands_for_all_of_them(name, method, op, num_ranks):
    machine = hardware.find(name)
    work = Workload(op, 768 * num_ranks, 512 * num_ranks, 256 * num_ranks, num_ranks)
    knobs = PlanOptions(num_splits=3 if method == "pipeline" else 1, streams=2)
    alone = times(work, machine, method, knobs)
    together = times(work, machine, method, knobs, every_rank=True)
    assert alone.seconds == pytest.approx(together.seconds)
    assert {span.rank for span in together.spans} == set(range(num_ranks))


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_collective_has_no_product(op):
    work = Workload(op, 1024, 512, 512, 4)
    kinds = {s.kind for s in times(work, hardware.find("h100"), "bulk").spans}
    assert "put" in kinds
    assert "multiply" not in kinds


def test_lanes_do_one_thing_at_a_time_and_streams_several():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    spans = times(
        work, hardware.find("h200"), "pipeline", PlanOptions(2, streams=2)
    ).spans
    for lane in ("wire", "sum"):
        mine = sorted((s.start_s, s.end_s) for s in spans if s.lane == lane)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    gemms = [(s.start_s, s.end_s) for s in spans if s.lane == "gemm"]
    assert any(a[1] > b[0] for a, b in zip(gemms, gemms[1:], strict=False))


def test_a_rank_of_a_host_does_one_thing_at_a_time_and_waits():
    work = Workload("all_gather_matmul", 4096, 512, 512, 4)
    spans = times(work, hardware.find("cpu"), every_rank=True).spans
    for rank in range(4):
        mine = [s for s in spans if s.rank == rank]
        assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
    assert {s.lane for s in spans} == {"rank"}


def test_chunks_in_one_kernel_are_sent_when_it_is_done():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    spans = times(work, hardware.find("h200"), knobs=PlanOptions(aggregate=3)).spans
    gemms = [span for span in spans if span.kind == "multiply"]
    assert [gemm.chunks for gemm in gemms] == [(1, 2, 3), (0,)]
    first_put = min(span.start_s for span in spans if span.kind == "put")
    assert first_put == gemms[0].end_s


def test_a_sum_is_sent_when_it_is_made():
    steps = schedules.steps_of("matmul_all_reduce", "pipeline", 1, 3, 2)
    moved = schedules.sums_at_once(steps)
    assert sorted(map(repr, moved)) == sorted(map(repr, steps))
    for at, step in enumerate(moved):
        if step.kind == "reduce":
            sent = moved[at + 1 : at + 3]
            assert [(s.kind, s.payload, s.split) for s in sent] == [
                ("put", "sum", step.split)
            ] * 2


def test_ranks_that_wait_for_each_other_are_an_error():
    steps = schedules.steps_of("all_gather", "bulk", 0, 2, 1)
    waits = [step for step in steps if step.kind == "wait"]
    work = Workload("all_gather", 8, 8, 8, 2)
    with pytest.raises(ArithmeticError, match="wait for ever"):
        replay.replay([waits], work, SMOOTH, PlanOptions())
