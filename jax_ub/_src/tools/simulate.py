"""Predicts how much overlap would help a model."""

import argparse
import dataclasses
import importlib
import pathlib
from typing import Any

import numpy as np

from jax_ub._src.errors import ShapeContractError, UnsupportedOverlapError, shown
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.output import format_count, format_seconds, format_table, writing
from jax_ub._src.prediction.estimate import estimate
from jax_ub._src.prediction.hardware import HARDWARE, Hardware, host
from jax_ub._src.runtime import cuda_engine
from jax_ub._src.tools import command_line
from jax_ub._src.tools.command_line import amount_of, name_of, positive
from jax_ub._src.tools.models import MODELS, Layer

Row = dict[str, Any]  # a JSON object
EXAMPLE = "simulate --tp 8 --hardware h100 --model llama3-70b"
_AUTO = MethodChoice(Method.AUTO)
# The colors of the bars that `--plot` draws, by number of tensor-parallel ranks.
_COLORS = {2: "#5aa2d8", 4: "#b5d5ea", 8: "#fdae6b"}
_SUFFIXES = (".png", ".pdf", ".svg")
# Bytes of memory traffic per element of a cast to FP8 with a scale per tensor or row:
# bf16 is read twice, to find the largest value and to cast, and e4m3 is written.
_CAST_BYTES = 2 + 2 + 1
_FP8_NOTES = (
    "  fp8: FP8 operands, bf16 partial sums, and the cast of x; wire: bf16 operands "
    'with wire_dtype="fp8"',
    "  wire dtype: whether the time of wire is less than that of bf16",
)


def layer_row(layer: Layer, M: int, num_ranks: int, machine: Hardware) -> Row:
    """Predicts the forward time of a linear layer."""
    sizes = M, layer.K, layer.N, num_ranks
    found = estimate(layer.op, _AUTO, *sizes, "bfloat16", machine)
    saved_s = found.serial_s - found.seconds
    return {
        "layer": layer.name,
        "op": layer.op,
        "M": M,
        "K": layer.K,
        "N": layer.N,
        "num_ranks": num_ranks,
        "gemm_us": 1e6 * found.gemm_s,
        "wire_us": 1e6 * found.wire_s,
        "serial_us": 1e6 * found.serial_s,
        "ideal_us": 1e6 * found.ideal_s,
        "plan_us": 1e6 * found.seconds,
        "method": found.method,
        "speedup": found.serial_s / found.seconds,
        "limit": found.serial_s / found.ideal_s,
        "hidden": saved_s / found.collective_s if num_ranks > 1 else 0.0,
    }


def fp8_row(layer: Layer, M: int, num_ranks: int, machine: Hardware) -> Row:
    """Predicts the forward time of a linear layer in bf16 and in FP8.

    The result has "bf16_us"; "fp8_us", which includes the cast of x, but not that of
    the kernel, which is cast once per step; their quotient "gain"; "wire_us", the time
    in bf16 with `wire_dtype="fp8"`; and "wire_dtype", which says whether that pays.
    """
    if not machine.has_fp8:
        raise UnsupportedOverlapError(
            f"simulate: {machine.name} has no FP8 GEMM. Use another --hardware, such "
            "as h100."
        )
    sizes = M, layer.K, layer.N, num_ranks
    bf16, fp8 = (
        estimate(layer.op, _AUTO, *sizes, dtype, machine)
        for dtype in ("bfloat16", "float8_e4m3fn")
    )
    part = machine.shared_by(num_ranks)
    cast_s = _CAST_BYTES / part.memory_bytes_per_s  # of one element
    x_cast_s = cast_s * (M * layer.K // num_ranks)
    # The collective runs after the GEMM, and sends half as many bytes as in bf16.
    sent_bytes = bf16.wire_s * part.wire_bytes_per_s / 2
    wire_s = bf16.library_gemm_s + part.vendor_collective_s(sent_bytes)
    if num_ranks == 1:
        wire_s = bf16.seconds
    elif layer.op == "matmul_reduce_scatter":
        # A rank casts M * N partial sums before it sends them, and then sums as many
        # received partial sums. These sums take about as long as the cast, hence the
        # factor 2.
        wire_s += 2 * cast_s * M * layer.N
    elif machine.is_host:
        wire_s = bf16.seconds + x_cast_s
    else:  # the rows are converted to bf16, half as long as a cast
        wire_s += x_cast_s + cast_s * M * layer.K / 2
    seconds = bf16.seconds, fp8.seconds + x_cast_s, wire_s
    return _fp8_row(layer.name, *(1e6 * each for each in seconds))


def _fp8_row(name, bf16_us, fp8_us, wire_us):
    return {
        "layer": name,
        "bf16_us": bf16_us,
        "fp8_us": fp8_us,
        "gain": bf16_us / fp8_us,
        "wire_us": wire_us,
        "wire_dtype": "pays" if wire_us < bf16_us else "costs",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp", type=positive, default=8, help="number of ranks (default: 8)")
    hardware = f"{', '.join(HARDWARE)} (default: h100)"
    add("--hardware", type=name_of(HARDWARE), default="h100", help=hardware)
    model = f"{', '.join(MODELS)} (default: llama3-70b)"
    add("--model", type=name_of(MODELS), default="llama3-70b", help=model)
    tokens = "M, over all ranks (default: 8192)"
    add("--tokens", type=positive, default=8192, help=tokens)
    cpu = HARDWARE["cpu"]
    gflops = "for --hardware cpu: bf16 GFLOP/s of all cores of this host "
    gflops += f"(default: {cpu.flops_per_s / 1e9:g}, two cores with AVX2)"
    add("--gflops", type=amount_of("GFLOP/s"), help=gflops)
    copy = "for --hardware cpu: GB/s of a copy on this host, reads and writes "
    copy += f"(default: {cpu.memory_bytes_per_s / 1e9:g})"
    add("--copy-gbs", type=amount_of("GB/s"), help=copy)
    fp8 = 'also predict layers in FP8, and with wire_dtype="fp8"'
    add("--fp8", action="store_true", help=fp8)
    command_line.add_json(parser, "all figures")
    plot = f"file for a picture of the gain, for tp = {', '.join(map(str, _COLORS))}"
    add("--plot", type=picture_path, help=plot)
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints the predicted times of all linear layers of a model on one machine."""
    command_line.check_json_differs("simulate", given, "plot")
    machine, layers = _machine(given), MODELS[given.model]
    if not _divides(layers, given.tokens, given.tp):
        raise ShapeContractError(
            f"simulate: {given.model} with --tokens {given.tokens} does not divide "
            f"into --tp {given.tp} ranks. Take a --tp that divides the sizes, and a "
            "multiple of it as --tokens."
        )
    if given.tp > cuda_engine.MOST_RANKS and not machine.is_host:
        raise UnsupportedOverlapError(
            f"simulate: --tp {given.tp} on {shown(machine.name)}: the CUDA engine "
            f"overlaps at most {cuda_engine.MOST_RANKS} ranks. Take a smaller --tp."
        )
    if given.plot is not None:
        _draw(given, layers, machine)
    sizes = given.tokens, given.tp, machine
    rows = [layer_row(layer, *sizes) for layer in layers]
    total = {"layer": "sum", **_sums(rows, "serial_us", "ideal_us", "plan_us")}
    total["speedup"] = total["serial_us"] / total["plan_us"]
    total["limit"] = total["serial_us"] / total["ideal_us"]
    lines = [f"{given.model}, forward of one transformer layer, bf16, P = {given.tp}"]
    lines += [*(f"  {line}" for line in describe(machine)), ""]
    lines += _table([*rows, total])
    document = {"schema": 1, "hardware": dataclasses.asdict(machine), "rows": rows}
    if given.fp8:
        fp8 = [fp8_row(layer, *sizes) for layer in layers]
        fp8.append(_fp8_row("sum", **_sums(fp8, "bf16_us", "fp8_us", "wire_us")))
        document["fp8"] = fp8
        lines += ["", *_FP8_NOTES, "", *_table(fp8)]
    command_line.say(given, "\n".join(lines))
    command_line.write(given, document)
    return 0


def _sums(rows, *keys):
    return {key: sum(row[key] for row in rows) for key in keys}


def _divides(layers, tokens, num_ranks):
    return all(layer.shape(tokens).divides(num_ranks) for layer in layers)


def describe(machine: Hardware) -> list[str]:
    """Returns the text above the table: the machine's rates, and what columns mean."""
    each = "a host for all ranks" if machine.is_host else "each GPU"
    num_free = machine.reserved_processors
    kept_free = f"; {num_free} multiprocessors are kept free" if num_free else ""
    latencies = (machine.handshake_s, machine.launch_s, machine.collective_s)
    handshake, launch, collective = map(format_seconds, latencies)
    rates = (machine.wire_bytes_per_s, machine.memory_bytes_per_s)
    wire, memory = (format_count(rate, "B/s") for rate in rates)
    return [
        f"{machine.name}, {each}: {format_count(machine.flops_per_s, 'FLOP/s')} in a "
        f"large bf16 GEMM, {wire} to the peers, one direction, {memory} of memory",
        f"a put reaches {machine.wire_share:.0%} of the wire, a collective "
        f"{machine.collective_share:.0%}; handshake {handshake}, launch {launch}, "
        f"collective {collective}{kept_free}",
        "serial: the library's GEMM, then the collective; ideal: the longer of the two "
        "alone; plan: jax_ub",
    ]


def _table(rows):
    """Returns the lines of a table, whose columns are the keys of the first row."""
    keys = [key for key in rows[0] if key != "num_ranks"]
    header = [key.removesuffix("_us").replace("_", " ") for key in keys]
    cells = [[_cell(key, row.get(key, "")) for key in keys] for row in rows]
    right = [i for i, key in enumerate(keys) if not isinstance(rows[0][key], str)]
    return format_table(header, cells, right=right, is_markdown=True)


def _cell(key, value):
    if not isinstance(value, float):
        return str(value)
    if key.endswith("_us"):
        return format_seconds(value / 1e6)
    return f"{value:.0%}" if key == "hidden" else f"{value:.2f}"


def _machine(given):
    machine = HARDWARE[given.hardware]
    if given.gflops is None and given.copy_gbs is None:
        return machine
    if not machine.is_host:
        raise ShapeContractError(
            "simulate: --gflops and --copy-gbs are what a host measured; "
            f"{shown(machine.name)} has its figures. Add --hardware cpu."
        )
    return host(
        1e9 * given.gflops if given.gflops else machine.flops_per_s,
        1e9 * given.copy_gbs if given.copy_gbs else machine.memory_bytes_per_s,
    )


def picture_path(text: str) -> pathlib.Path:
    """Parses the path of an image file that can be written; an argparse `type`."""
    path = command_line.output_path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} does not end in {', '.join(_SUFFIXES)}. Name an image file."
        )
    return path


def _draw(given, layers, machine):
    """Draws speed-ups: a group of bars for each layer, a bar for each of `_COLORS`."""
    drawn = [num for num in _COLORS if _divides(layers, given.tokens, num)]
    if not drawn:
        raise ShapeContractError(
            f"simulate: --plot draws {', '.join(map(str, _COLORS))} ranks, and "
            f"--tokens {given.tokens} divides into none of them. Take a multiple."
        )
    command_line.load_extra("matplotlib", "simulate: --plot")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 3.6))
    panel = figure.subplots()
    width = 0.8 / len(drawn)  # of a bar
    for index, num_ranks in enumerate(drawn):
        rows = [layer_row(layer, given.tokens, num_ranks, machine) for layer in layers]
        x = np.arange(len(layers)) + (index - (len(drawn) - 1) / 2) * width
        speedups, limits = ([row[key] for row in rows] for key in ("speedup", "limit"))
        color, label = _COLORS[num_ranks], f"tp = {num_ranks}"
        panel.bar(x, speedups, 0.95 * width, color=color, label=label)
        limit = "perfect overlap" if num_ranks == drawn[-1] else None
        ends = x - width / 2, x + width / 2
        panel.hlines(limits, *ends, color="black", lw=1.4, label=limit)
        for at, speedup in zip(x, speedups, strict=True):
            panel.text(at, 0.04, f"{speedup:.2f}", ha="center", fontsize=8)
    panel.axhline(1, color="black", lw=0.8)
    panel.set_xticks(range(len(layers)), [one.name for one in layers], fontsize=7)
    panel.margins(x=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False}
    panel.legend(ncols=len(drawn) + 1, fontsize=8, **above)
    panel.set_ylabel("speed-up over GEMM, then collective")
    title = f"{given.model} on {machine.name}, {given.tokens} tokens, forward, bf16"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with writing(given.plot):
        figure.savefig(given.plot, dpi=120)
