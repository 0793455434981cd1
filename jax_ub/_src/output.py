"""What reports and commands write: tables, numbers with units, and files.

If a file cannot be written, the error is one line.
"""

import contextlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from jax_ub._src.errors import OutputError, shown

_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3))
# The smallest fractions of a unit that are printed in this unit, for bytes and for
# other quantities. They are below 1, because a value that is rounded to 1 is printed as
# "1.0 MiB", not as "1024.0 KiB".
_LEAST_BYTES, _LEAST = 1 - 0.05 / 1024, 0.9995


def version_of(package: str) -> str:
    """Returns the version of a package, or "of a source tree" if not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


def format_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[int] = (),
    has_rule: bool = False,
    is_markdown: bool = False,
) -> list[str]:
    """Returns the lines of a text or Markdown table with aligned columns.

    Args:
        header: the titles of the columns; empty for a table without titles.
        rows: the cells of each row, which `str` converts to text.
        right: the indices of the columns that are aligned right.
        has_rule: whether a line of dashes follows the titles.
        is_markdown: whether to write a Markdown table, which always has the rule.
    """
    titles = [header] if header else []
    texts = [*titles, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        format_row(cells, widths, right=right, is_markdown=is_markdown)
        for cells in texts
    ]
    if header and is_markdown:
        lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    elif header and has_rule:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def format_row(
    cells: Sequence[object],
    widths: Sequence[int],
    *,
    right: Collection[int] = (),
    is_markdown: bool = False,
) -> str:
    """Returns one row of a table as text, with each cell padded to its width.

    `format_table` documents the arguments.

    Commands that print rows as they are measured call it with fixed widths.
    """
    padded = [
        str(cell).rjust(width) if i in right else str(cell).ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |" if is_markdown else "  ".join(padded).rstrip()


def format_bytes(num_bytes: int) -> str:
    """Returns a size with a binary unit, such as "1.5 MiB"."""
    for unit, size in _BYTES:
        if num_bytes >= _LEAST_BYTES * size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Returns a time with three digits and its unit, such as "12.5 us"."""
    for unit, size in _SECONDS:
        if seconds >= _LEAST * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_count(count: float, unit: str = "") -> str:
    """Returns a count with three digits and a decimal prefix, such as "1.2 GFLOP"."""
    for prefix, size in _PREFIXES:
        if count >= _LEAST * size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:g} {unit}".rstrip()


def checked_output(path: str | os.PathLike, op: str | None = None) -> pathlib.Path:
    """Returns `path` if a file can be written there, and raises an error otherwise.

    Errors name the function `op` whose argument the path is; None is for commands.
    """
    path = pathlib.Path(path)
    name = shown(str(path)) if op is None else f"{op}: path = {shown(str(path))}"
    where = "" if op is None else f"{op}: "
    try:
        os.stat(path)
        exists = True
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    except (OSError, ValueError) as error:  # the name is too long or has a null byte
        why = getattr(error, "strerror", error)
        raise OutputError(f"{name} is not a file name: {why}.") from error
    if path.is_dir():
        raise OutputError(f"{name} is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise OutputError(
            f"{where}there is no folder {shown(str(path.parent))} for "
            f"{shown(path.name)}. Make it first."
        )
    if not os.access(path if exists else path.parent, os.W_OK):
        raise OutputError(
            f"{name} is not writable. Name another file, or change its permissions."
        )
    return path


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Converts an `OSError` of the block, such as a full disk, to an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {shown(str(path))}: {error.strerror}."
        ) from error


def write_json(path: pathlib.Path, document: Any, indent: int | None = 1) -> None:
    """Writes `document` as a JSON file. An `indent` of None writes a single line."""
    with writing(path):
        path.write_text(json.dumps(document, indent=indent) + "\n")
