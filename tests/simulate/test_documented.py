"""Figures of docs/simulate.md and docs/gpu.md, compared with the simulator."""

import pathlib
import re

import numpy as np

from jax_ub._src.methods import KernelOptions, Method, MethodChoice
from jax_ub._src.prediction import hardware
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.runtime.tuned_file import TunedKey
from jax_ub._src.tools.models import MODELS
from jax_ub._src.tools.simulate import fp8_row
from jax_ub._src.tools.tune.cases import candidates

AUTO = MethodChoice(Method.AUTO)
MACHINE = hardware.HARDWARE["h100"]
DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = DOCS / "simulate.md"


def candidates_of(layer, num_ranks):
    """Returns what `tune` measures, as far as the simulator distinguishes it."""
    sizes = (8192, layer.K, layer.N, "bfloat16")
    found = {AUTO: None}
    for choice in candidates(TunedKey(layer.op, num_ranks, *sizes), is_cuda=True):
        given = choice.kernel_options
        options = KernelOptions(num_lanes=given.num_lanes, variant=given.variant)
        found[MethodChoice(choice.method, choice.num_splits, options)] = None
    return list(found)


def row_of(layer, num_ranks):
    """Returns the cells of a layer that follow its name."""
    sizes = (8192, layer.K, layer.N, num_ranks, "bfloat16", MACHINE)
    auto = estimate(layer.op, AUTO, *sizes)
    tuned_s = min(
        estimate(layer.op, choice, *sizes).seconds
        for choice in candidates_of(layer, num_ranks)
    )
    times = (auto.serial_s, auto.seconds, auto.ideal_s)
    us = (f"{1e6 * s:.0f}" for s in times)
    compared = (auto.seconds, tuned_s, auto.ideal_s)
    return [*us, *(f"{auto.serial_s / seconds:.2f}" for seconds in compared)]


def test_the_table_of_llama_3_70b_is_what_the_simulator_predicts():
    section = PAGE.read_text().partition("## Llama 3 70B on H100s")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    layers = {layer.name: layer for layer in MODELS["llama3-70b"]}
    num_ranks = 0
    assert len(rows[2:]) == 3 * len(layers)
    for cells in rows[2:]:
        if cells[0]:
            num_ranks = int(cells[0])
        assert cells[2:] == row_of(layers[cells[1]], num_ranks), cells[1]


def first_power_without_xla(op):
    """Returns the number of tokens from which "auto" overlaps all layers of an op."""
    is_gather = op == "all_gather_matmul"
    layers = [
        layer
        for layer in MODELS["llama3-70b"]
        if (layer.op == "all_gather_matmul") == is_gather
    ]
    assert len(layers) == 2
    left_to_xla = [
        tokens
        for tokens in (2**n for n in range(6, 14))
        for layer in layers
        for sizes in [(tokens, layer.K, layer.N, 8)]
        if estimate(op, AUTO, *sizes, np.float16, MACHINE).method == "xla"
    ]
    return 2 * max(left_to_xla)


def test_the_tokens_below_which_auto_leaves_calls_to_xla_are_documented():
    text = " ".join((DOCS / "gpu.md").read_text().split())
    (limits,) = re.findall(
        r"below (\d+) tokens for AG\+GEMM, (\d+) for GEMM\+RS and (\d+) for GEMM\+AR, "
        "if their number is a power of two",
        text,
    )
    ops = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
    assert [*map(int, limits)] == [first_power_without_xla(op) for op in ops]


def test_the_gains_of_fp8_are_documented():
    text = " ".join(PAGE.read_text().split())
    (gains,) = re.findall(
        r"Llama 3 70B gain ([\d.]+) on H100s and ([\d.]+) on B200s, those of GPT-3 "
        r"([\d.]+) and ([\d.]+)\.",
        text,
    )
    rows = {
        (model, gpu): [
            fp8_row(layer, 8192, 8, hardware.HARDWARE[gpu]) for layer in MODELS[model]
        ]
        for model in MODELS
        for gpu in ("h100", "b200")
    }
    totals = {
        key: sum(row["bf16_us"] for row in found) / sum(row["fp8_us"] for row in found)
        for key, found in rows.items()
    }
    models = ("llama3-70b", "gpt3-175b")
    assert list(gains) == [
        f"{totals[model, gpu]:.2f}" for model in models for gpu in ("h100", "b200")
    ]
    pays = [
        (*key, row["layer"])
        for key, found in rows.items()
        for row in found
        if row["wire_dtype"] == "pays"
    ]
    assert pays == [("llama3-70b", "b200", "qkv")]
    assert "`wire_dtype` pays only for Llama's qkv on B200s" in text
