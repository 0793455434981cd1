"""The simulator's GEMMs and bounds, compared with a separate model in gpu_model.md."""

import dataclasses
import pathlib

import pytest

from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.prediction.replay import Processors, Workload
from jax_ub._src.tools.models import MODELS

MACHINE = dataclasses.replace(
    hardware.HARDWARE["h200"], reserved_processors=2, launch_s=3e-6
)
AUTO = MethodChoice(Method.AUTO)
UNRESERVED = dataclasses.replace(MACHINE, reserved_processors=0)
TEXT = pathlib.Path(__file__).with_name("gpu_model.md").read_text()


def published(title):
    """Returns the cells of each row of a published table."""
    section = TEXT.partition(f"### {title}")[2].partition("\n###")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def us(seconds):
    return f"{1e6 * seconds:.0f}"


def workload(name, layer, M, tp):
    layers = {layer.name: layer for layer in MODELS[name]}
    found = layers[layer.partition(" ")[0]]
    return Workload(found.op, int(M), found.K, found.N, int(tp))


LAYERS = published("Layers")
CHUNKED = published("Chunked GEMM")


def test_the_reference_has_all_tables():
    assert [len(table) for table in (LAYERS, CHUNKED)] == [108, 48]


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_the_bounds_of_the_separate_model(name):
    for cells in (cells for cells in LAYERS if cells[0] == name):
        work = workload(*cells[:4])
        sizes = (work.M, work.K, work.N, work.num_ranks)
        found = estimate(work.op, AUTO, *sizes, "bfloat16", MACHINE)
        times = (found.gemm_s, found.wire_s, found.serial_s, found.ideal_s)
        limit = found.serial_s / found.ideal_s
        assert cells[4:] == [*map(us, times), f"{limit:.2f}"]


@pytest.mark.parametrize("name", MODELS)
def test_a_gemm_in_chunks_takes_the_time_of_the_separate_model(name):
    for cells in (cells for cells in CHUNKED if cells[0] == name):
        work = workload(*cells[:4])
        whole = Processors(UNRESERVED, 1).run(0.0, work.gemm_of(work.M))[1]
        chunk = work.gemm_of(work.M // work.num_ranks)
        chunked = []
        for streams in (1, 2, 3):
            processors = Processors(MACHINE, streams)
            ends = [processors.run(0.0, chunk)[1] for _ in range(work.num_ranks)]
            chunked.append(max(ends))
        ratio = f"{min(chunked) / whole:.2f}"
        assert cells[4:] == [*map(us, (whole, *chunked)), ratio]
