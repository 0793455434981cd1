"""The replay of schedules, compared with formulas and between ranks."""

import dataclasses
import math

import pytest

from jax_ub._src.methods import KernelOptions, Method, MethodChoice, Variant
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.replay import (
    Gemm,
    Processors,
    Replay,
    Workload,
)
from jax_ub._src.runtime import cpu_engine

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


def replayed(
    work,
    machine,
    method="ring_exchange",
    num_splits=1,
    streams=1,
    variant=Variant.PLAIN,
    rank=0,
):
    options = KernelOptions(num_lanes=streams, variant=variant)
    choice = MethodChoice(Method(method), num_splits, options)
    return Replay(work, machine, choice, rank)


def spans_of(*arguments, **options):
    return replayed(*arguments, **options).spans


def seconds(*arguments, **options):
    return replayed(*arguments, **options).end_s


def chunk_times(workload, machine):
    rows = workload.M // workload.num_ranks
    gemm_s = 2 * math.prod(workload.gemm_of(rows)[:3]) / machine.flops_per_s
    wire_s = workload.wire_bytes("operand", rows) / machine.wire_bytes_per_s
    return gemm_s, wire_s


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("rate", [1e11, 1e13, 1e14])
def test_an_all_gather_matmul_equals_the_formula(num_ranks, rate):
    machine = dataclasses.replace(SMOOTH, flops_per_s=rate)
    # All sizes are multiples of the tile size.
    work = Workload(
        "all_gather_matmul", 256 * num_ranks, 512, 256 * num_ranks, num_ranks
    )
    gemm_s, wire_s = chunk_times(work, machine)
    others = num_ranks - 1

    def arrival_s(n):
        # The n-th chunk has arrived. The wait for it follows the next put.
        sent = min(n + 1, others) * wire_s
        return max(sent, n * wire_s + machine.handshake_s)

    later = [arrival_s(n) + (num_ranks - n) * gemm_s for n in range(1, num_ranks)]
    expected = max(num_ranks * gemm_s, *later)
    assert seconds(work, machine, "pipeline") == pytest.approx(expected)


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
    gemm_s = 2 * math.prod(work.gemm_of(work.M)[:3]) / machine.flops_per_s
    wire_s = work.wire_bytes("partial", work.M) / machine.wire_bytes_per_s
    sum_s = work.reduce_bytes(work.M) / machine.memory_bytes_per_s
    call = replayed(work, machine, variant=Variant.ONE_SHOT)
    # Each rank sends all of its partial sums to every peer, which sums them.
    assert call.end_s == pytest.approx(
        gemm_s + (num_ranks - 1) * wire_s + machine.handshake_s + sum_s
    )
    sent = [span for span in call.spans if span.kind == "put"]
    assert len(sent) * wire_s == pytest.approx(
        work.one_shot_bytes / machine.wire_bytes_per_s
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
    """A rank fills a slot of a peer when the peer fills that slot of another rank."""
    machine = hardware.HARDWARE[name]
    num_splits = 3 if method == "pipeline" else 1
    for num_ranks in (2, 3, 8):
        if variant is Variant.AGGREGATE and num_ranks == 3:
            continue  # pairs need an even number of ranks
        sizes = (768 * num_ranks, 512 * num_ranks, 256 * num_ranks)
        work = Workload(op, *sizes, num_ranks)
        filled_s, sent_s = {}, {}  # by receiver or sender, and slot
        for rank in range(num_ranks):
            steps = cpu_engine.load().schedule(
                op, method, rank, num_ranks, num_splits, variant.value
            )
            puts = [step for step in steps if step.kind == "put"]
            spans = spans_of(work, machine, method, num_splits, 2, variant, rank)
            times = [span.end_s for span in spans if span.kind == "put"]
            for put, time in zip(puts, times, strict=True):
                filled_s[put.peer, put.slot] = sent_s[rank, put.slot] = time
        assert filled_s == pytest.approx(sent_s)
        assert len(filled_s) == len(puts) * num_ranks


def test_pairs_of_chunks_are_one_kernel():
    work = Workload("all_gather_matmul", 4096, 4096, 4096, 8)
    spans = spans_of(work, hardware.HARDWARE["h200"], variant=Variant.AGGREGATE)
    gemms = [span.chunks for span in spans if span.kind == "multiply"]
    assert gemms == [(0,), (1,), (6, 7), (4, 5), (2, 3)]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_collective_has_no_product(op):
    work = Workload(op, 1024, 512, 512, 4)
    kinds = {s.kind for s in spans_of(work, hardware.HARDWARE["h100"], "bulk")}
    assert "put" in kinds
    assert "multiply" not in kinds


def test_a_lane_runs_one_step_at_a_time_and_streams_overlap():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    spans = spans_of(work, hardware.HARDWARE["h200"], "pipeline", 2, streams=2)
    mine = sorted((s.start_s, s.end_s) for s in spans if s.kind != "multiply")
    assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    gemms = [(s.start_s, s.end_s) for s in spans if s.kind == "multiply"]
    assert any(a[1] > b[0] for a, b in zip(gemms, gemms[1:], strict=False))


@pytest.mark.parametrize(
    ("op", "method", "num_launches"),
    [
        ("all_gather_matmul", "pipeline", 24),
        ("matmul_reduce_scatter", "ring_exchange", 19),
        ("matmul_all_reduce", "ring_exchange", 36),
    ],
)
def test_a_gpu_launches_as_often_as_the_engine(op, method, num_launches):
    # As counted by CallsOfEightRanksTakeFewLaunches in cuda_engine_test.cc.
    work = Workload(op, 1024, 1024, 1024, 8)
    call = replayed(work, hardware.HARDWARE["h100"], method, streams=2)
    assert call.num_launches == num_launches


def test_an_all_reduce_in_one_exchange_is_one_kernel_and_its_gemm():
    work = Workload("matmul_all_reduce", 64, 1024, 1024, 8)
    call = replayed(work, hardware.HARDWARE["h100"], variant=Variant.ONE_SHOT)
    # The kernel sends, waits and sums.
    kinds = [span.kind for span in call.spans]
    assert kinds == ["multiply", *7 * ["put"], "reduce", "end"]
    assert call.num_launches == 3


def test_a_sum_runs_when_the_gemms_before_it_leave_the_multiprocessors():
    machine = hardware.HARDWARE["h100"]
    processors = Processors(machine, 1)
    _, first_s = processors.run(0.0, Gemm(4096, 4096, 4096))
    start, end = processors.run_on_all(0.0, 1e-4)
    assert start == machine.launch_s
    assert end == pytest.approx(first_s + 1e-4)
    _, last_s = processors.run(0.0, Gemm(128, 128, 64))
    assert last_s > first_s + 1e-4


def test_a_rank_of_a_host_runs_one_step_at_a_time():
    work = Workload("all_gather_matmul", 4096, 512, 512, 4)
    spans = spans_of(work, hardware.HARDWARE["cpu"])
    assert all(a.end_s <= b.start_s for a, b in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize(
    ("op", "machine", "num_puts"),
    [
        ("all_gather_matmul", "h100", 3),
        ("matmul_reduce_scatter", "h100", 4 * 3),
        ("all_gather_matmul", "cpu", 4 * 3),
    ],
)
def test_a_pipeline_has_as_many_splits_as_the_engine(op, machine, num_puts):
    work = Workload(op, 4096, 4096, 4096, 4)
    spans = spans_of(work, hardware.HARDWARE[machine], "pipeline", num_splits=0)
    assert sum(span.kind == "put" for span in spans) == num_puts


def test_a_variant_that_an_op_lacks_has_no_effect():
    work = Workload("matmul_reduce_scatter", 4096, 4096, 4096, 4)
    machine = hardware.HARDWARE["h100"]
    found = spans_of(work, machine, variant=Variant.AGGREGATE)
    assert found == spans_of(work, machine)
