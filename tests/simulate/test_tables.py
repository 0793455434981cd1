"""The replayed schedules give the figures of a model that knows no schedules."""

import dataclasses
import functools
import pathlib

import pytest

from jax_ub._src.tools.simulate import hardware, models, plan, tables
from jax_ub._src.tools.simulate.bounds import bounds
from jax_ub._src.tools.simulate.replay import PlanOptions
from jax_ub._src.tools.simulate.tiles import Gemm, Processors

MACHINE = hardware.find("h200")
TEXT = pathlib.Path(__file__).with_name("gpu_model.md").read_text()


def published(title):
    """The cells of each line of one table, keyed by the columns before the figures."""
    section = TEXT.partition(f"### {title}")[2].partition("\n###")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def us(seconds):
    return f"{1e6 * seconds:.0f}"


def sizes(name, layer, M, tp):
    model = models.find(name)
    return model, model.layer(layer.partition(" ")[0]), int(M), int(tp)


@functools.cache
def layer_row(name, layer, M, tp):
    return tables.layer_row(*sizes(name, layer, M, tp), MACHINE)


LAYERS = published("Layers")
SUMS = published("Forward sum")
ALL_REDUCES = published("GEMM+AR")
CHUNKED = published("Chunked GEMM")


def test_every_table_is_there():
    assert [len(t) for t in (LAYERS, SUMS, ALL_REDUCES, CHUNKED)] == [108, 27, 27, 48]


@pytest.mark.parametrize("name", models.MODELS)
def test_layers_take_what_the_model_says(name):
    for cells in (cells for cells in LAYERS if cells[0] == name):
        row = layer_row(*cells[:4])
        limits = row.bounds
        assert cells[1].endswith(f"({row.layer.short_op})")
        assert cells[4:] == [
            *map(us, (limits.gemm_s, limits.wire_s, limits.serial_s, limits.ideal_s)),
            us(row.plan_s),
            row.plan.text,
            f"{row.limit:.2f}",
            f"{row.speedup:.2f}",
            f"{row.share_of_ideal:.2f}",
            f"{row.hidden:.0%}",
        ]


@pytest.mark.parametrize("name", models.MODELS)
def test_layers_add_up_as_the_model_says(name):
    for cells in (cells for cells in SUMS if cells[0] == name):
        M, tp = cells[1:3]
        layers = models.find(name).layers
        whole = tables.total(layer_row(name, f"{o.name} ()", M, tp) for o in layers)
        assert cells[3:] == [
            *map(us, (whole.serial_s, whole.ideal_s, whole.plan_s)),
            f"{whole.serial_s / whole.ideal_s:.2f}",
            f"{whole.serial_s / whole.plan_s:.2f}",
        ]


def all_reduce_by_blocks(layer, M, num_ranks):
    """The layer without sequence parallelism: its bounds, and seconds by row blocks.

    Only the second half's last block is exposed, so that row blocks are the whole gain.
    """
    workload = dataclasses.replace(
        tables.workload_of(layer, M, num_ranks), op="matmul_all_reduce"
    )
    limits = bounds(workload, MACHINE)

    def seconds(blocks):
        # One kernel for all that is sent, one for the own rows.
        knobs = PlanOptions(blocks, aggregate=num_ranks - 1, streams=2)
        found = plan.timeline(workload, MACHINE, "pipeline", knobs).seconds
        return max(found, limits.gemm_s)

    counts = [n for n in (1, 2, 4) if workload.piece_rows(n) >= plan.MIN_ROWS]
    return limits, {count: seconds(count) for count in counts}


def in_one_and_in_chunks(layer, M, num_ranks):
    """Seconds of a GEMM whole, and in P chunks on 1, 2, 3 streams: nothing is sent."""
    gemm = tables.workload_of(layer, M, num_ranks).gemm
    chunk = Gemm(M // num_ranks, gemm.n, gemm.k)
    whole = Processors(MACHINE, 1, 2, MACHINE.processors).run(0.0, gemm)[1]
    chunked = []
    for streams in (1, 2, 3):
        processors = Processors(MACHINE, streams, 2)
        chunked.append(max(processors.run(0.0, chunk)[1] for _ in range(num_ranks)))
    return whole, chunked


@pytest.mark.parametrize("cells", ALL_REDUCES, ids=lambda cells: "-".join(cells[:3]))
def test_all_reduces_by_row_blocks_take_what_the_model_says(cells):
    _, layer, M, tp = sizes(cells[0], "fc2", *cells[1:3])
    limits, by_blocks = all_reduce_by_blocks(layer, M, tp)
    assert cells[3:] == [
        *map(us, (limits.gemm_s, limits.wire_s, limits.serial_s)),
        *map(us, by_blocks.values()),
        f"{limits.serial_s / min(by_blocks.values()):.2f}",
        f"{limits.serial_s / limits.ideal_s:.2f}",
    ]


@pytest.mark.parametrize("cells", CHUNKED, ids=lambda cells: "-".join(cells[:4]))
def test_a_gemm_in_chunks_takes_what_the_model_says(cells):
    _, layer, M, tp = sizes(*cells[:4])
    whole, chunked = in_one_and_in_chunks(layer, M, tp)
    assert cells[4:] == [*map(us, (whole, *chunked)), f"{min(chunked) / whole:.2f}"]


def test_fewer_rows_than_a_tile_are_not_cut_further():
    layer = models.find("gpt3-175b").layer("fc2")
    assert list(all_reduce_by_blocks(layer, 1024, 8)[1]) == [1, 2]
