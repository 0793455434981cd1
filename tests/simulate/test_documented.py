"""The table of docs/simulate.md, compared with what the simulator predicts."""

import pathlib

from jax_ub._src.methods import Method
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.cost import Workload, bounds
from jax_ub._src.prediction.estimate import estimate_workload
from jax_ub._src.tools.simulate import MODELS

MACHINE = hardware.find("h100")
PAGE = pathlib.Path(__file__).parents[2] / "docs/simulate.md"
METHODS = (Method.AUTO, Method.RING_EXCHANGE, Method.PIPELINE)


def row_of(layer, num_ranks, goal):
    """Returns the cells of a layer that follow its name."""
    work = Workload(layer.op, 8192, layer.K, layer.N, num_ranks)
    limits = bounds(work, MACHINE)
    times = [estimate_workload(work, method, MACHINE).seconds for method in METHODS]
    auto, tuned, limit = (
        limits.serial_s / seconds for seconds in (times[0], min(times), limits.ideal_s)
    )
    reached = "yes" if auto >= goal else "tuned" if tuned >= goal else "no"
    if limit < goal:
        reached = "no, the limit is lower"
    us = (f"{1e6 * s:.0f}" for s in (limits.serial_s, times[0], limits.ideal_s))
    return [*us, *(f"{ratio:.2f}" for ratio in (auto, tuned, limit)), reached]


def test_the_table_of_llama_3_70b_is_what_the_simulator_predicts():
    section = PAGE.read_text().partition("## Llama 3 70B on H100s")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    layers = {layer.name: layer for layer in MODELS["llama3-70b"]}
    num_ranks = goal = 0
    assert len(rows[2:]) == 3 * len(layers)
    for cells in rows[2:]:
        if cells[0]:
            num_ranks, goal = int(cells[0]), float(cells[1])
        assert cells[3:] == row_of(layers[cells[2]], num_ranks, goal), cells[2]
