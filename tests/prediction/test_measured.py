"""The simulator, compared with measurements on an H100 in docs/gpu."""

import dataclasses
import json
import pathlib
import re

import pytest

from jax_ub._src.methods import KernelOptions, Method, MethodChoice
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.replay import Processors, Replay, Workload
from jax_ub._src.tools.models import MODELS

MACHINE = hardware.HARDWARE["h100"]
UNRESERVED = dataclasses.replace(MACHINE, reserved_processors=0)
MEASURED = pathlib.Path(__file__).parents[2] / "docs/gpu/2026-11-27"
LANES = KernelOptions.num_lanes


def figures(name):
    return json.loads((MEASURED / name).read_text())["figures"]


@pytest.mark.parametrize(
    ("model", "layer", "num_ranks"),
    [
        *(("llama3-70b", layer, 8) for layer in ("qkv", "proj", "fc1", "fc2")),
        ("llama3-70b", "qkv", 4),
        ("llama3-405b", "qkv", 8),
        ("llama3-405b", "fc1", 8),
    ],
)
def test_gemms_in_chunks_are_predicted_within_a_sixth(model, layer, num_ranks):
    """GEMMs of a layer in chunks over one GEMM, with the engine's default options."""
    free = MACHINE.processors - MACHINE.reserved_processors
    size = model.removeprefix("llama3-").upper()
    (measured,) = (
        ratio
        for name, ratio in figures("gpu_bench_a88e61e.json").items()
        if re.fullmatch(
            rf"chunked .*, {size} {layer} +P={num_ranks}, {LANES} streams, "
            rf"target {free}",
            name,
        )
    )
    (found,) = (one for one in MODELS[model] if one.name == layer)
    work = Workload(found.op, 8192, found.K, found.N, num_ranks)
    whole = Processors(UNRESERVED, 1).run(0.0, work.gemm_of(work.M))[1]
    processors = Processors(MACHINE, LANES)
    chunk = work.gemm_of(work.M // num_ranks)
    chunked = max(processors.run(0.0, chunk)[1] for _ in range(num_ranks))
    assert chunked / whole == pytest.approx(measured, rel=1 / 6)


@pytest.mark.parametrize(
    ("op", "method", "title"),
    [
        ("all_gather_matmul", "pipeline", "AG+GEMM"),
        ("matmul_reduce_scatter", "ring_exchange", "GEMM+RS"),
        ("matmul_all_reduce", "ring_exchange", "GEMM+AR"),
    ],
)
def test_launches_of_small_calls_are_predicted_within_two_fifths(op, method, title):
    """Replayed calls of one rank of eight, whose transfers stay on its GPU."""
    name = f"{title} of 64 tokens, P=8, replayed, us"
    measured_us = figures("loopback_17b2020.json")[name]
    work = Workload(op, 64, 1024, 1024, 8)
    call = Replay(work, MACHINE, MethodChoice(Method(method)))
    assert 1e6 * call.end_s == pytest.approx(measured_us, rel=0.4)
