"""Predicts how much overlap would help a model."""

import argparse
import dataclasses
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.methods import Method
from jax_ub._src.output import format_table, writing
from jax_ub._src.prediction import hardware as machines
from jax_ub._src.prediction.cost import Workload, bounds
from jax_ub._src.prediction.estimate import (
    Fp8Prediction,
    estimate_workload,
    predict_fp8,
)
from jax_ub._src.prediction.hardware import Hardware
from jax_ub._src.tools import command_line
from jax_ub._src.tools.command_line import (
    amount_of,
    load_extra,
    name_of,
    output_path,
    positive,
)

EXAMPLE = "simulate --tp 8 --hardware h100 --model llama3-70b"
# The tensor-parallel sizes that `--plot` draws.
_DRAWN = (2, 4, 8)
_SUFFIXES = (".png", ".pdf", ".svg")
_COLORS = ("#5aa2d8", "#b5d5ea", "#fdae6b")
_GROUP_WIDTH = 0.8


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer of a transformer model: its forward op and global sizes [K, N]."""

    name: str
    op: str
    K: int
    N: int


def _layers(hidden: int, qkv: int, ffn_in: int, ffn_out: int) -> tuple[Layer, ...]:
    """Returns the linear layers (qkv, proj, fc1, fc2) of one transformer layer.

    `ffn_in` are the output features of the first MLP layer, including the gate,
    `ffn_out` the input features of the second one.
    """
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    return (
        Layer("qkv", gather, hidden, qkv),
        Layer("proj", scatter, hidden, hidden),
        Layer("fc1", gather, hidden, ffn_in),
        Layer("fc2", scatter, ffn_out, hidden),
    )


# The linear layers of one transformer layer of each model, in the order of execution.
MODELS: Mapping[str, tuple[Layer, ...]] = {
    "llama3-70b": _layers(8192, 10240, 57344, 28672),
    "llama3-405b": _layers(16384, 18432, 106496, 53248),
    "gpt3-175b": _layers(12288, 36864, 49152, 49152),
}


def layer_rows(
    layers: Sequence[Layer], M: int, num_ranks: int, machine: Hardware
) -> list[dict[str, Any]]:
    """Predicts each linear layer's forward time; returns a JSON object for each."""
    rows = []
    for layer in layers:
        # A `Workload` has partial sums with 2 bytes per element by default, because
        # GPUs round them to bf16 before they send them.
        work = Workload(layer.op, M, layer.K, layer.N, num_ranks)
        plan = estimate_workload(work, Method.AUTO, machine)
        alone, plan_s = bounds(work, machine), plan.seconds
        saved = (alone.serial_s - plan_s) / alone.collective_s if num_ranks > 1 else 0.0
        rows.append(
            {
                "layer": layer.name,
                "op": layer.op,
                "M": M,
                "K": layer.K,
                "N": layer.N,
                "num_ranks": num_ranks,
                "gemm_us": 1e6 * alone.gemm_s,
                "wire_us": 1e6 * alone.wire_s,
                "serial_us": 1e6 * alone.serial_s,
                "ideal_us": 1e6 * alone.ideal_s,
                "plan_us": 1e6 * plan_s,
                "method": plan.method,
                "knobs": plan.knobs,
                "speedup": alone.serial_s / plan_s,
                "limit": alone.serial_s / alone.ideal_s,
                "hidden": saved,
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp", type=positive, default=8, help="number of ranks (default: 8)")
    hardware = f"{', '.join(machines.HARDWARE)} (default: h100)"
    add("--hardware", type=name_of(machines.HARDWARE), default="h100", help=hardware)
    model = f"{', '.join(MODELS)} (default: llama3-70b)"
    add("--model", type=name_of(MODELS), default="llama3-70b", help=model)
    tokens = "M, over all ranks (default: 8192)"
    add("--tokens", type=positive, default=8192, help=tokens)
    gflops = "for --hardware cpu: bf16 GFLOP/s of all cores of this host"
    add("--gflops", type=amount_of("GFLOP/s"), help=gflops)
    copy = "for --hardware cpu: GB/s of a copy on this host, reads and writes"
    add("--copy-gbs", type=amount_of("GB/s"), help=copy)
    fp8 = 'also predict layers in FP8, and with wire_dtype="fp8"'
    add("--fp8", action="store_true", help=fp8)
    command_line.add_json(parser, "all figures")
    plot = f"file for a picture of the gain, for tp = {', '.join(map(str, _DRAWN))}"
    add("--plot", type=picture_path, help=plot)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints the predicted times of all linear layers of a model on one machine."""
    machine, layers = _machine(given), MODELS[given.model]
    if not _divides(given, layers, given.tp):
        raise ShapeContractError(
            f"simulate: {given.model} with --tokens {given.tokens} does not divide "
            f"into --tp {given.tp} ranks. Take a --tp that divides the sizes, and a "
            "multiple of it as --tokens."
        )
    drawn = [num for num in _DRAWN if _divides(given, layers, num)]
    if given.plot is not None:
        if not drawn:
            raise ShapeContractError(
                f"simulate: --plot draws {', '.join(map(str, _DRAWN))} ranks, and "
                f"--tokens {given.tokens} divides into none of them. Take a multiple."
            )
        _load_pyplot()  # fails before anything is computed
    rows = layer_rows(layers, given.tokens, given.tp, machine)
    title = f"{given.model}, forward of one transformer layer, bf16, P = {given.tp}"
    shown_rows = [
        *({**row, "op": _SHORT_OPS[row["op"]]} for row in rows),
        _sum_row(rows),
    ]
    lines = [title, *(f"  {line}" for line in describe(machine)), ""]
    lines += _table(shown_rows, _COLUMNS, right=range(2, len(_COLUMNS)))
    fp8 = fp8_rows(layers, given.tokens, given.tp, machine) if given.fp8 else []
    if fp8:
        fp8_table = _table(fp8, _FP8_COLUMNS, right=range(1, 5))
        lines += ["", *_FP8_NOTES, "", *fp8_table]
    command_line.say(given, "\n".join(lines))
    document = {"schema": 1, "hardware": dataclasses.asdict(machine), "rows": rows}
    document |= {"fp8": fp8} if fp8 else {}
    command_line.write(given, document)
    if given.plot is not None:
        title = f"{given.model} on {machine.name}, {given.tokens} tokens, forward, bf16"
        found = {
            f"tp = {num}": layer_rows(layers, given.tokens, num, machine)
            for num in drawn
        }
        _draw(found, title, given.plot)
    return 0


def describe(machine: Hardware) -> list[str]:
    """Returns the text above the table: the machine's rates, and what columns mean."""
    each = "a host for all ranks" if machine.is_host else "each GPU"
    latencies_s = (machine.handshake_s, machine.launch_s, machine.collective_s)
    handshake, launch, collective = (f"{1e6 * value:.3g}" for value in latencies_s)
    return [
        f"{machine.name}, {each}: {machine.flops_per_s / 1e12:.4g} TFLOP/s in a large "
        f"bf16 GEMM, {machine.wire_bytes_per_s / 1e9:.4g} GB/s to the peers, one "
        f"direction, {machine.memory_bytes_per_s / 1e12:.3g} TB/s of memory",
        f"a put reaches {machine.wire_share:.0%} of the wire, a collective "
        f"{machine.collective_share:.0%}; handshake {handshake} us, launch {launch} "
        f"us, collective {collective} us; {machine.reserved_processors} "
        "multiprocessors are kept free",
        "serial: the library's GEMM, then the collective; ideal: the longer of the two "
        "alone; plan: jax_ub",
        "knobs: b row blocks, a chunks per kernel, s streams",
    ]


# The columns of both tables, each with the format of its values. They are named after
# the keys of the dicts that `layer_rows` and `fp8_rows` return.
_COLUMNS = {
    **{"layer": "", "op": "", "M": "", "K": "", "N": ""},
    **{f"{name}_us": ".0f" for name in ("gemm", "wire", "serial", "ideal", "plan")},
    **{"method": "", "knobs": "", "speedup": ".2f", "limit": ".2f", "hidden": ".0%"},
}
_FP8_COLUMNS = {
    **{"layer": "", "bf16_us": ".0f", "fp8_us": ".0f", "gain": ".2f"},
    **{"wire_us": ".0f", "wire_dtype": ""},
}
_UNITS = (("us", 1), ("ms", 1e3), ("s", 1e6))
_SHORT_OPS = {"all_gather_matmul": "ag", "matmul_reduce_scatter": "rs"}


def _table(rows, columns, right):
    unit, size_us = _time_unit(rows)

    def cell(row, key, text):
        if key not in row:
            return ""
        return format(row[key] / size_us if key.endswith("_us") else row[key], text)

    cells = [[cell(row, *column) for column in columns.items()] for row in rows]
    header = [
        key.replace("_us", f" {unit}").replace("_", " ").replace("speedup", "speed-up")
        for key in columns
    ]
    return format_table(header, cells, right=right, is_markdown=True)


def _time_unit(rows):
    """Returns the unit of a table's times and its microseconds: ("ms", 1e3) for ms."""
    longest_us = max(row[key] for row in rows for key in row if key.endswith("_us"))
    fitting = (each for each in _UNITS if longest_us < 1e5 * each[1])
    return next(fitting, _UNITS[-1])


def _sum_row(rows):
    keys = ("serial_us", "ideal_us", "plan_us")
    sums = {key: sum(row[key] for row in rows) for key in keys}
    serial_us, ideal_us, plan_us = sums.values()
    ratios = {"speedup": serial_us / plan_us, "limit": serial_us / ideal_us}
    return {"layer": "sum", **sums, **ratios}


_FP8_NOTES = (
    "  fp8: FP8 operands, bf16 partial sums, and the cast of x; wire: bf16 operands "
    'with wire_dtype="fp8"',
    "  wire dtype: whether the time of wire is less than that of bf16",
)


def fp8_rows(
    layers: Sequence[Layer], M: int, num_ranks: int, machine: Hardware
) -> list[dict[str, Any]]:
    """Predicts each layer's forward time in bf16 and FP8; returns a JSON object each.

    The last object has the sums over all layers.
    """
    found, total = [], [0.0] * 3
    for layer in layers:
        work = Workload(layer.op, M, layer.K, layer.N, num_ranks)
        fp8 = predict_fp8(work, machine)
        total = [a + b for a, b in zip(total, dataclasses.astuple(fp8), strict=True)]
        found.append((layer.name, fp8))
    return [
        {
            "layer": name,
            **{"bf16_us": 1e6 * one.bf16_s, "fp8_us": 1e6 * one.fp8_s},
            **{"gain": one.bf16_s / one.fp8_s, "wire_us": 1e6 * one.wire_s},
            "wire_dtype": "pays" if one.wire_s < one.bf16_s else "costs",
        }
        for name, one in (*found, ("sum", Fp8Prediction(*total)))
    ]


def _machine(given):
    machine = machines.HARDWARE[given.hardware]
    if given.gflops is None and given.copy_gbs is None:
        return machine
    if not machine.is_host:
        raise ShapeContractError(
            "simulate: --gflops and --copy-gbs are what a host measured; "
            f"{shown(machine.name)} has its figures. Add --hardware cpu."
        )
    return machines.host(
        1e9 * given.gflops if given.gflops else machine.flops_per_s,
        1e9 * given.copy_gbs if given.copy_gbs else machine.memory_bytes_per_s,
    )


def _divides(given, layers, num_ranks):
    sizes = [given.tokens, *(size for one in layers for size in (one.K, one.N))]
    return all(size % num_ranks == 0 for size in sizes)


def picture_path(text: str) -> pathlib.Path:
    """Parses the path of an image file that can be written; an argparse `type`."""
    path = output_path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} does not end in {', '.join(_SUFFIXES)}. Name an image file."
        )
    return path


def _load_pyplot() -> Any:
    """Imports pyplot with a backend that writes files and needs no display."""
    load_extra("matplotlib", "simulate: --plot").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _draw(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: pathlib.Path
) -> None:
    """Draws speed-ups: a group of bars for each layer, a bar for each key of `rows`."""
    pyplot = _load_pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 3.6))
    layers = [row["layer"] for row in next(iter(rows.values()))]
    width = _GROUP_WIDTH / len(rows)
    for index, (name, series) in enumerate(rows.items()):
        x = np.arange(len(layers)) + (index - (len(rows) - 1) / 2) * width
        speedups, limits = (
            [row[key] for row in series] for key in ("speedup", "limit")
        )
        panel.bar(x, speedups, 0.95 * width, color=_COLORS[index], label=name)
        label = "perfect overlap" if index == len(rows) - 1 else None
        ends = x - width / 2, x + width / 2
        panel.hlines(limits, *ends, color="black", lw=1.4, label=label)
        for at, speedup in zip(x, speedups, strict=True):
            panel.text(at, 0.04, f"{speedup:.2f}", ha="center", fontsize=8)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(layers)), layers, fontsize=7)
    panel.margins(x=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False}
    panel.legend(ncols=len(rows) + 1, fontsize=8, **above)
    panel.set_ylabel("speed-up over GEMM, then collective")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
