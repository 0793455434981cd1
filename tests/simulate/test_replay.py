"""The replay of schedules, compared with formulas and between ranks."""

import dataclasses

import pytest

from jax_ub._src.methods import Variant
from jax_ub._src.tools.simulate import hardware, replay
from jax_ub._src.tools.simulate.cost import Workload
from jax_ub._src.tools.simulate.estimate import timeline
from jax_ub._src.tools.simulate.replay import PlanOptions, end_s

# A machine with one processor, which runs every chunk as one kernel, so that no time is
# rounded up to whole waves.
SMOOTH = dataclasses.replace(
    hardware.host(1e12, 1e11),
    name="smooth",
    processors=1,
    launch_s=0.0,
    handshake_s=3e-6,
)
METHODS = ("ring_exchange", "pipeline", "external")
PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def spans_of(work, machine, method="ring_exchange", options=None, **which):
    return timeline(work, machine, method, options or PlanOptions(), **which)


def seconds(*arguments, **which):
    return end_s(spans_of(*arguments, **which))


def chunk_times(workload, machine):
    rows = workload.split_rows(1)
    gemm_s = workload.gemm_of(rows).flops / machine.flops_per_s
    wire_s = workload.wire_bytes("operand", rows) / machine.copy_bytes_per_s
    return gemm_s, wire_s


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("rate", [1e11, 1e13, 1e14])
def test_a_ring_of_all_gather_matmul_equals_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    # All sizes are multiples of the tile size.
    work = Workload(
        "all_gather_matmul", 256 * num_ranks, 512, 256 * num_ranks, num_ranks
    )
    gemm_s, wire_s = chunk_times(work, machine)
    shard = 256 * 512 * 2
    first = 2 * shard / machine.memory_bytes_per_s + machine.handshake_s
    # If a chunk takes longer to multiply than to send, only the first put is exposed.
    others = num_ranks - 1
    assert seconds(work, machine) == pytest.approx(
        max(
            num_ranks * gemm_s,
            first + wire_s + others * gemm_s,
            first + others * wire_s + gemm_s,
        )
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("rate", [1e11, 1e13, 1e14])
def test_a_ring_of_matmul_reduce_scatter_equals_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    work = Workload(
        "matmul_reduce_scatter", 256 * num_ranks, 512 * num_ranks, 256, num_ranks
    )
    gemm_s, wire_s = chunk_times(work, machine)
    sum_s = work.reduce_bytes(256) / machine.memory_bytes_per_s
    # The own chunk is last. Each partial sum is sent when it is complete.
    others = num_ranks - 1
    arrived = max(others * gemm_s + wire_s, gemm_s + others * wire_s)
    assert seconds(work, machine) == pytest.approx(
        max(num_ranks * gemm_s, arrived + machine.handshake_s) + sum_s
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("rate", [1e11, 1e13, 1e14])
def test_a_one_shot_all_reduce_equals_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    work = Workload(
        "matmul_all_reduce", 256 * num_ranks, 512 * num_ranks, 256, num_ranks
    )
    gemm_s = work.gemm.flops / machine.flops_per_s
    wire_s = work.wire_bytes("partial", work.M) / machine.copy_bytes_per_s
    sum_s = work.reduce_bytes(work.M) / machine.memory_bytes_per_s
    spans = spans_of(work, machine, variant=Variant.ONE_SHOT)
    # Each rank sends all of its partial sums to every peer, which sums them.
    assert end_s(spans) == pytest.approx(
        gemm_s + (num_ranks - 1) * wire_s + machine.handshake_s + sum_s
    )
    sent = [span for span in spans if span.kind == "put"]
    assert len(sent) * wire_s == pytest.approx(
        work.one_shot_bytes / machine.copy_bytes_per_s
    )


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize(
    ("op", "method", "variant"),
    [
        *((op, method, Variant.PLAIN) for op in PATTERNS for method in METHODS),
        ("all_gather_matmul", "ring_exchange", Variant.AGGREGATE),
        ("matmul_reduce_scatter", "pipeline", Variant.OVERLAP_FIRST_GEMM),
        ("matmul_all_reduce", "pipeline", Variant.OVERLAP_FIRST_GEMM),
        ("matmul_all_reduce", "ring_exchange", Variant.ONE_SHOT),
        ("all_reduce", "ring_exchange", Variant.ONE_SHOT),
    ],
)
def test_one_rank_represents_all_ranks(name, op, method, variant):
    machine = hardware.find(name)
    for num_ranks in (2, 3, 8):
        if variant is Variant.AGGREGATE and num_ranks == 3:
            continue  # pairs need an even number of ranks
        sizes = (768 * num_ranks, 512 * num_ranks, 256 * num_ranks)
        work = Workload(op, *sizes, num_ranks)
        options = PlanOptions(num_splits=3 if method == "pipeline" else 1, streams=2)
        given = (work, machine, method, options)
        together = spans_of(*given, variant=variant, every_rank=True)
        assert seconds(*given, variant=variant) == pytest.approx(end_s(together))
        assert {span.rank for span in together} == set(range(num_ranks))


def test_pairs_of_chunks_are_one_kernel():
    work = Workload("all_gather_matmul", 4096, 4096, 4096, 8)
    spans = spans_of(work, hardware.find("h200"), variant=Variant.AGGREGATE)
    gemms = [span.chunks for span in spans if span.kind == "multiply"]
    assert gemms == [(0,), (1,), (6, 7), (4, 5), (2, 3)]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_collective_has_no_product(op):
    work = Workload(op, 1024, 512, 512, 4)
    kinds = {s.kind for s in spans_of(work, hardware.find("h100"), "bulk")}
    assert "put" in kinds
    assert "multiply" not in kinds


def test_a_lane_runs_one_step_at_a_time_and_streams_overlap():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    options = PlanOptions(2, streams=2)
    spans = spans_of(work, hardware.find("h200"), "pipeline", options)
    for lane in ("wire", "sum"):
        mine = sorted((s.start_s, s.end_s) for s in spans if s.lane == lane)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    gemms = [(s.start_s, s.end_s) for s in spans if s.lane == "gemm"]
    assert any(a[1] > b[0] for a, b in zip(gemms, gemms[1:], strict=False))


def test_a_rank_of_a_host_runs_one_step_at_a_time():
    work = Workload("all_gather_matmul", 4096, 512, 512, 4)
    spans = spans_of(work, hardware.find("cpu"), every_rank=True)
    for rank in range(4):
        mine = [s for s in spans if s.rank == rank]
        assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
    assert {s.lane for s in spans} == {"rank"}


def test_chunks_of_one_kernel_are_sent_when_it_has_finished():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    options = PlanOptions(aggregate=3)
    spans = spans_of(work, hardware.find("h200"), options=options)
    gemms = [span for span in spans if span.kind == "multiply"]
    assert [gemm.chunks for gemm in gemms] == [(1, 2, 3), (0,)]
    first_put = min(span.start_s for span in spans if span.kind == "put")
    assert first_put == gemms[0].end_s


def test_a_sum_is_sent_right_after_its_reduction():
    steps = replay.steps_of("matmul_all_reduce", "pipeline", 1, 3, 2, variant="plain")
    moved = replay.sums_at_once(steps)
    assert sorted(map(repr, moved)) == sorted(map(repr, steps))
    for at, step in enumerate(moved):
        if step.kind == "reduce":
            sent = moved[at + 1 : at + 3]
            assert [(s.kind, s.payload, s.split) for s in sent] == [
                ("put", "sum", step.split)
            ] * 2


def test_a_deadlock_is_an_error():
    steps = replay.steps_of("all_gather", "bulk", 0, 2, 1, variant="plain")
    waits = [step for step in steps if step.kind == "wait"]
    work = Workload("all_gather", 8, 8, 8, 2)
    with pytest.raises(ArithmeticError, match="wait for ever"):
        replay.replay([waits], work, SMOOTH, PlanOptions())
