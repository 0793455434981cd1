"""The table that `explain` returns, with one row per linear or collective."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table of `explain`: one call, or several equal ones.

    Attributes:
        scope: a name given by the user, or a path in the program.
        op: computation, such as "all_gather_matmul".
        overlapped: whether a GEMM hides the communication, or there is none.
        method: method that runs, such as "direct" or "xla".
        reason: why the call is not overlapped; empty if it is.
        moved_bytes: bytes that each rank sends per call; None if unknown.
        predicted_s: predicted seconds per call.
        measured_exposed_s: average waiting time of a rank in a trace, in seconds.
        note: further remarks, such as the number of calls.
        flops: a rank's floating-point operations per call; None if unknown.
        count: number of calls as far as it is known; at least 1.
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


@dataclasses.dataclass(frozen=True)
class Table:
    """The table that `explain` returns, with a row for each call in program order.

    `print(table)` formats it.

    Attributes:
        rows: the calls.
        title: the first line.
        notes: lines printed below the table.
    """

    rows: tuple[Row, ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    @property
    def overlapped(self) -> bool:
        """Returns whether all rows are overlapped; true for a table without rows."""
        return all(row.overlapped for row in self.rows)

    @property
    def custom_call_flops(self) -> int:
        """Returns a rank's FLOPs in jax_ub's calls, summed over the table.

        XLA's cost analysis counts them as 0, because they are custom calls.
        """
        custom = (row for row in self.rows if row.method != "xla")
        return sum(row.count * (row.flops or 0) for row in custom)

    def as_json(self) -> dict[str, Any]:
        """Returns the rows, title, notes and `overlapped` as JSON types."""
        return {**dataclasses.asdict(self), "overlapped": self.overlapped}

    def __str__(self) -> str:
        """Formats the table as text with aligned columns, to be printed.

        Most columns are omitted if they are empty in every row.
        """
        lines = [self.title] if self.title else []
        if self.rows:
            lines += _aligned([_cells(row) for row in self.rows])
        lines += self.notes
        return "\n".join(lines)


def _cells(row: Row) -> dict[str, str]:
    return {
        "where": row.scope,
        "op": row.op,
        "overlapped": "yes" if row.overlapped else "NO",
        "method": row.method,
        "FLOP": "" if row.flops is None else flops_text(row.flops),
        "sends": "" if row.moved_bytes is None else _bytes(row.moved_bytes),
        "predicted": _seconds(row.predicted_s),
        "exposed": _seconds(row.measured_exposed_s),
        "why not": row.reason,
        "note": row.note,
    }


def _aligned(rows: list[dict[str, str]]) -> list[str]:
    shown = [
        name
        for name in rows[0]
        if name in ("where", "op", "overlapped", "method") or any(r[name] for r in rows)
    ]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    head = "  ".join(f"{name:<{widths[name]}}" for name in shown).rstrip()
    rule = "  ".join("-" * widths[name] for name in shown)
    body = [
        "  ".join(f"{row[name]:<{widths[name]}}" for name in shown).rstrip()
        for row in rows
    ]
    return [head, rule, *body]


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def flops_text(count: int) -> str:
    """Formats a number of floating-point operations with a prefix, such as "1.2 G"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
