"""The table that `explain` returns, its notes, and what its columns are made from."""

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ub._src import lowering_log
from jax_ub._src.errors import (
    ConfigurationError,
    ShapeContractError,
    TraceError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub._src.lowering_log import LoweredCall
from jax_ub._src.output import format_bytes, format_count, format_seconds, format_table
from jax_ub._src.prediction.hardware import HARDWARE, Hardware, name_of_kind
from jax_ub._src.scalars import is_integer, is_number
from jax_ub._src.tools.explain.hlo import Collective
from jax_ub._src.tools.trace import traces
from jax_ub._src.tools.trace.traces import Recording, Trace

_ASSUMED = "h200"  # for devices that the simulator does not know
_MAX_SCOPE = 60  # characters of a path in the table
_ALWAYS_SHOWN = ("where", "op", "overlapped", "method")
_GATHERS_NOTE = (
    "all-gathers are of activations or their gradients: on an explicit mesh, shard the "
    "tokens over the axis after the embedding"
)
_GATHERS_HINT = "shard kernels and activations as these calls do"
# The fields of `Hardware` by name. A user may give them as a dict.
_RATES = {field.name: field for field in dataclasses.fields(Hardware)}
# The names of the fields that have no default value.
_REQUIRED = [
    name for name, field in _RATES.items() if field.default is dataclasses.MISSING
]

HardwareLike = str | Mapping[str, Any] | Hardware | None
TraceLike = Recording | Trace | str | pathlib.Path | Sequence[str | pathlib.Path] | None
# Maps (label, op) of a call to the seconds per call that a rank waits in a trace.
Waits = Mapping[tuple[str, str], float]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table that `explain` prints, for one call or several equal calls.

    Attributes:
        scope: a name given by the user, or a path in the program.
        op: computation, such as "all_gather_matmul".
        overlapped: whether a GEMM hides the communication. Also true for a GEMM that
            communicates nothing, and for a collective of jax_ub without a GEMM.
        method: method that runs, such as "direct" or "xla".
        reason: why the call is not overlapped; empty if it is.
        moved_bytes: bytes that each rank sends per call; None if unknown.
        predicted_s: predicted seconds per call.
        measured_exposed_s: median waiting time of a rank in a trace, in seconds.
        note: further remarks, such as the number of calls.
        flops: a rank's floating-point operations per call; None if unknown.
        count: number of calls as far as it is known; at least 1.
        dtype: dtype of the multiplied arrays, or both if they differ, such as
            "e5m2 x e4m3"; for a collective alone, the dtype that it moves.
        source: file and line in the user's program, for XLA's collectives; empty if
            unknown.
        axis: mesh axes along which a collective of XLA communicates; empty if unknown.
    """

    scope: str
    op: str
    overlapped: bool
    method: str
    reason: str = ""
    moved_bytes: int | None = None
    predicted_s: float | None = None
    measured_exposed_s: float | None = None
    note: str = ""
    flops: int | None = None
    count: int = 1
    dtype: str = ""
    source: str = ""
    axis: str = ""

    @property
    def is_collective(self) -> bool:
        """Returns whether the row is a collective of jax_ub without a GEMM."""
        return self.overlapped and self.flops == 0


@dataclasses.dataclass(frozen=True)
class Table:
    """The table that `explain` returns, with a row per call. `print` formats it.

    Attributes:
        rows: the calls.
        title: the first line.
        notes: lines printed below the table.
        hardware: name of the machine of the predicted times, if it is not the one on
            which the program runs.
    """

    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    hardware: str = ""

    @property
    def overlapped(self) -> bool:
        """Returns whether every call in the table overlaps its communication."""
        return all(row.overlapped for row in self.rows)

    @property
    def custom_call_flops(self) -> int:
        """Returns a rank's FLOPs in jax_ub's calls, which XLA does not count."""
        custom = (row for row in self.rows if row.method != "xla")
        return sum(row.count * (row.flops or 0) for row in custom)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields of the table and of its rows as JSON types."""
        return {**dataclasses.asdict(self), "overlapped": self.overlapped}

    def __str__(self) -> str:
        """Formats the table as text, without optional columns that have no values."""
        lines = [self.title] if self.title else []
        cells = [_cells(row, self.hardware) for row in self.rows]
        if cells:
            header = [
                name
                for name in cells[0]
                if name in _ALWAYS_SHOWN or any(row[name] for row in cells)
            ]
            rows = [[row[name] for name in header] for row in cells]
            lines += format_table(header, rows, has_rule=True)
        return "\n".join([*lines, *self.notes])


def _cells(row: Row, hardware: str) -> dict[str, str]:
    def optional(format_value, value):
        return "" if value is None else format_value(value)

    overlapped = "yes" if row.overlapped else "NO"
    return {
        "where": _shortened(row.scope),
        "line": pathlib.PurePath(row.source).name,
        "op": row.op,
        "axis": row.axis,
        "dtype": row.dtype,
        "overlapped": "no GEMM" if row.is_collective else overlapped,
        "method": row.method,
        "FLOP": optional(format_count, row.flops),
        "sends": optional(format_bytes, row.moved_bytes),
        f"predicted {hardware}".rstrip(): optional(format_seconds, row.predicted_s),
        "exposed here" if hardware else "exposed": optional(
            format_seconds, row.measured_exposed_s
        ),
        "why not": row.reason,
        "note": row.note,
    }


def _shortened(scope: str) -> str:
    """Shortens a scope, such as "model/block/mlp", if it is too long for the table.

    The first names of the path are then replaced by "...".
    """
    kept = scope
    while len(kept) > _MAX_SCOPE and "/" in kept:
        kept = kept.partition("/")[2]
    if len(kept) > _MAX_SCOPE:
        return f"{kept[: _MAX_SCOPE - 3]}..."
    return scope if kept == scope else f".../{kept}"


def collective_notes(
    found: Sequence[Collective],
    lowered: Sequence[LoweredCall],
    axes: Collection[str] | None,
) -> Iterator[str]:
    """Yields the notes about XLA's collectives that have no row in the table.

    The arguments are described at `program.table_of`.
    """
    others = collections.Counter(
        one.kind for one in found if not one.could_be and not note_of(one, axes)
    )
    if others:
        listed = ", ".join(f"{kind} x {num}" for kind, num in sorted(others.items()))
        yield f"XLA's collectives without a dot next to them: {listed}"
    moved: dict[str, list[int]] = {}
    for one in found:
        if note := note_of(one, axes):
            moved.setdefault(note, []).append(one.moved_bytes)
    for note, sizes in moved.items():
        yield f"{note} x {len(sizes)}, sends {format_bytes(sum(sizes))}"
    calls = [
        one.scope
        for one in found
        if one.kind == "all-gather" and one.is_reshard_over(axes)
    ]
    if calls:
        names = ", ".join(dict.fromkeys(calls))
        yield f"XLA adds all-gather x {len(calls)} next to {names}: {_GATHERS_HINT}"
    gathers = _num_activation_gathers(found, lowered)
    if gathers > 1:  # one is needed for the gradient of the embedding
        yield f"{gathers} {_GATHERS_NOTE}"


def note_of(one: Collective, axes: Collection[str] | None) -> str | None:
    """Returns the note on a collective that has no row in the table, or None.

    Notes count gradients of parameters that are summed, and parameters that are
    gathered, because no call of jax_ub could overlap them. Over mesh axes that are not
    in `axes`, the axes of tensor parallelism, this is data parallelism.
    """
    if lowering_log.fallback_in(one.scope) is not None or not one.axes:
        return None
    names = ", ".join(one.axes)
    if one.is_of_kernel and axes is not None and not set(one.axes) & set(axes):
        what = "parameters" if one.kind == "all-gather" else "gradients"
        return f"data parallelism over {names}: {one.kind} of {what}"
    if one.sums_parameter_gradient:
        return f"tokens sharded over {names}: {one.kind} of gradients"
    return None


def _num_activation_gathers(found, lowered) -> int:
    """Counts the all-gathers of activations that have no adjacent dot.

    The result of such an all-gather has as many rows as x has tokens in one of the
    calls. Results with the shape of a kernel do not count, because the gradients of
    kernels are gathered, too.
    """
    sizes = [one.call.global_sizes(one.operands)[1:] for one in lowered]
    tokens = {M for M, _, _ in sizes}
    kernels = {shape for _, K, N in sizes for shape in ((K, N), (N, K))}
    shapes = [one.gathered for one in found if len(one.gathered) > 1]
    return sum(
        math.prod(shape[:-1]) in tokens and shape not in kernels for shape in shapes
    )


def find_hardware(hardware: HardwareLike) -> Hardware:
    """Returns the machine for which `explain` predicts times, from a name or rates.

    The rates of a dict replace those of the machine that its "name" selects. None
    selects the kind of this process's devices.
    """
    if hardware is None:
        return HARDWARE[_local_machine() or _ASSUMED]
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, Mapping):
        if not isinstance(hardware, str) or hardware not in HARDWARE:
            raise UnknownNameError(
                f"hardware {shown(hardware)} is not known. "
                f"{nearest(hardware, HARDWARE)}"
            )
        return HARDWARE[hardware]
    rates: dict[str, Any] = {}
    for key, value in hardware.items():
        if key not in _RATES:
            raise UnknownNameError(
                f"explain: hardware has the key {shown(key)}, which is not known. "
                f"{nearest(key, _RATES)}"
            )
        rates[key] = _checked_rate(key, value)
    base = HARDWARE.get(rates.setdefault("name", "custom"))
    missing = [key for key in _REQUIRED if key not in rates]
    if base is None and missing:
        raise ConfigurationError(
            f"explain: hardware = {shown(hardware)} lacks {', '.join(missing)}. Pass "
            f"them, or the name of a known machine: {', '.join(HARDWARE)}."
        )
    machine = dataclasses.replace(base, **rates) if base else Hardware(**rates)
    if 0 < machine.processors <= machine.reserved_processors:
        raise ConfigurationError(
            f"explain: hardware has processors = {machine.processors}, and "
            f"reserved_processors = {machine.reserved_processors} of them run no GEMM. "
            "Pass more processors, or 0 for the cores of a host."
        )
    return machine


def _checked_rate(key, value) -> str | int | float:
    """Checks a field of `Hardware`; returns its value as a Python string or number."""
    is_rate = key.endswith(("_per_s", "_share"))
    if key == "name":
        kind, is_valid = "a string", isinstance(value, str)
    elif key.endswith("processors"):
        kind, is_valid = "an integer", is_integer(value) and value >= 0
    else:
        kind = "a positive rate" if is_rate else "a time"
        is_valid = is_number(value) and (value > 0 if is_rate else value >= 0)
    if not is_valid:
        raise ConfigurationError(
            f"explain: hardware has {key} = {shown(value)}, which is not {kind}."
        )
    return value.item() if isinstance(value, np.generic) else value


def table_on(
    hardware: HardwareLike, rows: Sequence[Row], title: str, notes: Sequence[str]
) -> Table:
    """Returns a table, with a note if times are predicted for an assumed machine.

    A machine is assumed if the user gives none and the local devices are unknown.
    """
    machine, local = find_hardware(hardware), _local_machine()
    is_predicted = any(row.predicted_s is not None for row in rows)
    assumed = []
    if hardware is None and local is None and is_predicted:
        device = shown(jax.devices()[0].device_kind)
        assumed.append(
            f"unknown device {device}: times are predicted for {_ASSUMED}. Pass "
            "hardware=, a machine of `python -m jax_ub simulate`"
        )
    other = "" if machine == HARDWARE.get(local or "") else machine.name
    return Table(tuple(rows), title, (*notes, *assumed), other)


@functools.cache
def _local_machine() -> str | None:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    return name_of_kind(device.device_kind)


def read_waits(trace: TraceLike) -> Waits:
    """Returns {(label, op): seconds that a rank waits} from a trace or its files."""
    if trace is None:
        return {}
    if isinstance(trace, Recording):
        if trace.trace is None:
            raise TraceError(
                "explain: trace is a recording that has not ended. Call explain after "
                "the block of ub.trace."
            )
        trace = trace.trace
    if isinstance(trace, Trace):
        return trace.exposed_by_op_s()
    paths: list[Any] = [*trace] if isinstance(trace, list | tuple) else [trace]
    if not all(isinstance(path, str | pathlib.Path) for path in paths):
        raise ShapeContractError(
            f"explain: trace = {shown(trace)} is not a trace. Pass what ub.trace "
            "recorded, the path of its file, or a list of paths."
        )
    return traces.read([*map(pathlib.Path, paths)]).exposed_by_op_s()
