"""Predicts how much overlap would help a model: `python -m jax_ub simulate`."""

import argparse
import math
import sys

from jax_ub._src.errors import ShapeContractError, shown
from jax_ub._src.files import write_json
from jax_ub._src.tools import options
from jax_ub._src.tools.options import output_path, picture_path
from jax_ub._src.tools.simulate import hardware as machines
from jax_ub._src.tools.simulate import models, plot, tables, variants
from jax_ub._src.tools.simulate.hardware import Hardware

_COLUMNS = (
    ("layer", 5),
    ("op", 2),
    ("M", 6),
    ("K", 6),
    ("N", 6),
    ("gemm us", 8),
    ("wire us", 8),
    ("serial us", 9),
    ("ideal us", 8),
    ("plan us", 8),
    ("knobs", 7),
    ("speed-up", 8),
    ("limit", 5),
    ("hidden", 6),
)
_VARIANT_COLUMNS = (
    ("layer", 5),
    ("op", 2),
    ("M", 6),
    ("method", 13),
    ("variant", 18),
    ("plain us", 8),
    ("so us", 8),
    ("speed-up", 8),
    ('"auto"', 6),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `simulate` to its argument parser."""
    known = ", ".join(machines.HARDWARE)
    parser.add_argument("--tp", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--hardware", default="h100", help=f"{known} (default: h100)")
    parser.add_argument(
        "--model",
        default="llama3-70b",
        help=f"{', '.join(models.MODELS)} (default: llama3-70b)",
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="M, over all ranks (default: 8192)"
    )
    parser.add_argument(
        "--layer",
        help="whose schedule the PNG shows (default: the farthest from ideal)",
    )
    parser.add_argument(
        "--gflops", type=float, help="of this host, for --hardware cpu: all cores, bf16"
    )
    parser.add_argument(
        "--copy-gbs", type=float, help="GB/s this host copies, read and written"
    )
    parser.add_argument("--json", type=output_path, help="write all figures there")
    parser.add_argument("--png", type=picture_path, help="draw bars and a timeline")
    parser.set_defaults(run=command)


def command(given: argparse.Namespace) -> int:
    """Prints the predicted times of all linear layers of a model on one machine.

    Each layer has a line with its times with and without overlap. A second table
    compares the variants of the schedules.
    """
    machine = _machine(given)
    model = models.find(given.model)
    _check(given, model)
    if given.png is not None:
        options.load_pyplot("simulate: --png")
    rows = [
        tables.layer_row(model, layer, given.tokens, given.tp, machine)
        for layer in model.layers
    ]
    out = sys.stdout
    out.write(f"{model.name}, forward of one transformer layer, bf16, P = {given.tp}\n")
    out.write("\n".join(f"  {line}" for line in describe(machine)) + "\n\n")
    out.write("\n".join(table(rows)) + "\n")
    others = variants.rows(model, given.tokens, given.tp, machine)
    if others:
        out.write("\nvariants, as the engine runs them: a kernel for each product\n\n")
        out.write("\n".join(variant_table(others)) + "\n")
    if given.json is not None:
        document = {
            "schema": 1,
            "hardware": machine.__dict__,
            "rows": [row.as_json() for row in rows],
            "variants": [row.as_json() for row in others],
        }
        write_json(given.json, document)
    if given.png is not None:
        shown = _shown(given, model, rows)
        plot.draw(rows, shown, machine, given.png)
    return 0


def describe(machine: Hardware) -> list[str]:
    """Returns lines of text that describe the machine's rates and the table's terms."""
    each = "a host for all ranks" if machine.is_host else "each GPU"
    handshake, launch, collective = _us(
        machine.handshake_s, machine.launch_s, machine.collective_s
    )
    return [
        f"{machine.name}, {each}: {machine.flops_per_s / 1e12:.4g} TFLOP/s in a large "
        f"bf16 GEMM, {machine.wire_bytes_per_s / 1e9:.4g} GB/s to the peers, one "
        f"direction, {machine.memory_bytes_per_s / 1e12:.3g} TB/s of memory",
        f"a put reaches {machine.wire_share:.0%} of the wire, a collective "
        f"{machine.collective_share:.0%}; handshake {handshake} us, launch {launch} "
        f"us, collective {collective} us; {machine.reserved_processors} "
        "multiprocessors are kept free",
        "serial: the library's GEMM, then the collective; ideal: the longer of the two "
        "alone; plan: the engine's schedule, replayed",
        "knobs: b row blocks, a chunks in a kernel, s streams",
    ]


def table(rows: list[tables.LayerRow]) -> list[str]:
    """Returns the lines of the table of predicted times, one for each layer."""
    lines = _head(_COLUMNS)
    for row in rows:
        limits = row.bounds
        lines.append(
            _line(
                _COLUMNS,
                [
                    row.layer.name,
                    row.layer.short_op,
                    str(row.M),
                    str(row.layer.K),
                    str(row.layer.N),
                    *_us(limits.gemm_s, limits.wire_s, limits.serial_s, limits.ideal_s),
                    *_us(row.plan_s),
                    row.plan.text,
                    f"{row.speedup:.2f}",
                    f"{row.limit:.2f}",
                    f"{row.hidden:.0%}",
                ],
            )
        )
    whole = tables.total(rows)
    sums = _us(whole.serial_s, whole.ideal_s, whole.plan_s)
    ratios = [
        f"{whole.serial_s / whole.plan_s:.2f}",
        f"{whole.serial_s / whole.ideal_s:.2f}",
    ]
    lines.append(_line(_COLUMNS, ["sum", *[""] * 6, *sums, "", *ratios, ""]))
    return lines


def variant_table(rows: list[variants.VariantRow]) -> list[str]:
    """Returns the lines of the table that compares a schedule with its variants."""
    lines = _head(_VARIANT_COLUMNS)
    for row in rows:
        cells = [
            row.layer.name,
            row.short_op,
            str(row.M),
            row.method,
            row.variant.value,
            *_us(row.plain_s, row.variant_s),
            f"{row.speedup:.2f}",
            "yes" if row.is_auto else "",
        ]
        lines.append(_line(_VARIANT_COLUMNS, cells))
    return lines


def _head(columns):
    names = _line(columns, [name for name, _ in columns])
    return [names, "|" + "|".join("-" * (width + 2) for _, width in columns) + "|"]


def _us(*seconds):
    return [f"{1e6 * value:.0f}" for value in seconds]


def _line(columns, cells):
    padded = (
        f"{cell:>{width}}" for (_, width), cell in zip(columns, cells, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _machine(given):
    machine = machines.find(given.hardware)
    if given.gflops is None and given.copy_gbs is None:
        return machine
    if not machine.is_host:
        raise ShapeContractError(
            "simulate: --gflops and --copy-gbs are what a host measured; "
            f"{shown(machine.name)} has its figures. Add --hardware cpu."
        )
    return machines.host(
        _measured("--gflops", given.gflops, machine.flops_per_s),
        _measured("--copy-gbs", given.copy_gbs, machine.memory_bytes_per_s),
    )


def _measured(option, giga, otherwise):
    if giga is None:
        return otherwise
    if not 0 < giga < math.inf:
        raise ShapeContractError(
            f"simulate: {option} {giga:g} is no rate. Give a positive number."
        )
    return 1e9 * giga


def _check(given, model):
    sizes = [given.tokens, *(size for one in model.layers for size in (one.K, one.N))]
    if given.tp < 1 or any(size < 1 or size % given.tp for size in sizes):
        raise ShapeContractError(
            f"simulate: {model.name} with {given.tokens} tokens does not divide into "
            f"{given.tp} ranks. Take a --tp that divides the sizes, and a multiple of "
            "it as --tokens."
        )
    if given.layer is not None:
        model.layer(given.layer)
        if given.png is None:
            raise ShapeContractError(
                f"simulate: --layer {given.layer} is what a picture shows. Add --png."
            )


def _shown(given, model, rows):
    if given.layer is None:
        return min(rows, key=lambda row: row.share_of_ideal)
    layer = model.layer(given.layer)
    return next(row for row in rows if row.layer == layer)
