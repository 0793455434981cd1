"""The simulator, compared with the figures of a separate model in gpu_model.md."""

import dataclasses
import functools
import pathlib

import pytest

from jax_ub._src.methods import Method
from jax_ub._src.tools.simulate import hardware, models
from jax_ub._src.tools.simulate.command import layer_rows
from jax_ub._src.tools.simulate.cost import Gemm, Processors, Workload, bounds
from jax_ub._src.tools.simulate.estimate import MIN_ROWS, estimate_workload, timeline
from jax_ub._src.tools.simulate.replay import PlanOptions, end_s

MACHINE = hardware.find("h200")
TEXT = pathlib.Path(__file__).with_name("gpu_model.md").read_text()


def published(title):
    """Returns the cells of each row of a published table, by first columns."""
    section = TEXT.partition(f"### {title}")[2].partition("\n###")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def us(seconds):
    return f"{1e6 * seconds:.0f}"


def sizes(name, layer, M, tp):
    layers = {layer.name: layer for layer in models.MODELS[name].layers}
    return layers[layer.partition(" ")[0]], int(M), int(tp)


@functools.cache
def rows(name, M, tp):
    """Returns the rows of a model's layers with the separate model's methods."""
    found = layer_rows(models.MODELS[name], int(M), int(tp), MACHINE)
    return [
        dataclasses.replace(row, plan=plan_of(workload(row.layer, int(M), int(tp))))
        for row in found
    ]


def plan_of(work):
    method = Method.RING_EXCHANGE if work.gathers else Method.PIPELINE
    return estimate_workload(work, method, MACHINE)


def workload(layer, M, tp, op=None):
    return Workload(op or layer.op, M, layer.K, layer.N, tp)


LAYERS = published("Layers")
SUMS = published("Forward sum")
ALL_REDUCES = published("GEMM+AR")
CHUNKED = published("Chunked GEMM")


def test_the_reference_has_all_tables():
    assert [len(t) for t in (LAYERS, SUMS, ALL_REDUCES, CHUNKED)] == [108, 27, 27, 48]


@pytest.mark.parametrize("name", models.MODELS)
def test_layers_take_the_time_of_the_separate_model(name):
    for cells in (cells for cells in LAYERS if cells[0] == name):
        title = cells[1].partition(" ")[0]
        row = next(r for r in rows(name, *cells[2:4]) if r.layer.name == title)
        limits = row.bounds
        assert cells[4:] == [
            *map(us, (limits.gemm_s, limits.wire_s, limits.serial_s, limits.ideal_s)),
            us(row.plan.seconds),
            row.plan.knobs,
            f"{row.limit:.2f}",
            f"{row.speedup:.2f}",
            f"{limits.ideal_s / row.plan.seconds:.2f}",
            f"{row.hidden:.0%}",
        ]


@pytest.mark.parametrize("name", models.MODELS)
def test_layers_add_up_to_the_time_of_the_separate_model(name):
    for cells in (cells for cells in SUMS if cells[0] == name):
        layers = rows(name, *cells[1:3])
        serial, ideal = (
            sum(getattr(row.bounds, key) for row in layers)
            for key in ("serial_s", "ideal_s")
        )
        plan = sum(row.plan.seconds for row in layers)
        assert cells[3:] == [
            *map(us, (serial, ideal, plan)),
            f"{serial / ideal:.2f}",
            f"{serial / plan:.2f}",
        ]


def all_reduce_by_blocks(layer, M, num_ranks):
    """Returns bounds and seconds, by number of row blocks, of a layer that all-reduces.

    Only the last block of the all-gather is exposed, so row blocks are the whole gain.
    """
    work = workload(layer, M, num_ranks, "matmul_all_reduce")
    limits = bounds(work, MACHINE)

    def seconds(blocks):
        # One kernel for all chunks that are sent, one for the own rows.
        options = PlanOptions(blocks, aggregate=num_ranks - 1, streams=2)
        found = timeline(work, MACHINE, "pipeline", options)
        return max(end_s(found), limits.gemm_s)

    counts = [n for n in (1, 2, 4) if work.split_rows(n) >= MIN_ROWS]
    return limits, {count: seconds(count) for count in counts}


def in_one_and_in_chunks(layer, M, num_ranks):
    """Returns the seconds of a GEMM, whole and in P chunks on 1 to 3 streams."""
    gemm = workload(layer, M, num_ranks).gemm
    chunk = Gemm(M // num_ranks, gemm.n, gemm.k)
    whole = Processors(MACHINE, 1, 2, MACHINE.processors).run(0.0, gemm)[1]
    chunked = []
    for streams in (1, 2, 3):
        processors = Processors(MACHINE, streams, 2)
        chunked.append(max(processors.run(0.0, chunk)[1] for _ in range(num_ranks)))
    return whole, chunked


@pytest.mark.parametrize("name", models.MODELS)
def test_all_reduces_by_row_blocks_take_the_time_of_the_separate_model(name):
    for cells in (cells for cells in ALL_REDUCES if cells[0] == name):
        check_all_reduce(cells)


def check_all_reduce(cells):
    layer, M, tp = sizes(cells[0], "fc2", *cells[1:3])
    limits, by_blocks = all_reduce_by_blocks(layer, M, tp)
    assert cells[3:] == [
        *map(us, (limits.gemm_s, limits.wire_s, limits.serial_s)),
        *map(us, by_blocks.values()),
        f"{limits.serial_s / min(by_blocks.values()):.2f}",
        f"{limits.serial_s / limits.ideal_s:.2f}",
    ]


@pytest.mark.parametrize("name", models.MODELS)
def test_a_gemm_in_chunks_takes_the_time_of_the_separate_model(name):
    for cells in (cells for cells in CHUNKED if cells[0] == name):
        check_chunks(cells)


def check_chunks(cells):
    layer, M, tp = sizes(*cells[:4])
    whole, chunked = in_one_and_in_chunks(layer, M, tp)
    assert cells[4:] == [*map(us, (whole, *chunked)), f"{min(chunked) / whole:.2f}"]


def test_fewer_rows_than_a_tile_are_not_cut_further():
    layer = models.MODELS["gpt3-175b"].layers[3]
    assert list(all_reduce_by_blocks(layer, 1024, 8)[1]) == [1, 2]
