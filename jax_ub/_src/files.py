"""Writes files, with one-line errors if a file cannot be read or written."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ub._src.errors import UbError, shown


class OutputError(UbError, OSError):
    """Raised if a file cannot be written, for example because the disk is full."""


class InputError(UbError, OSError):
    """Raised if a file cannot be read, for example because it does not exist."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Converts an `OSError` in the block, such as a full disk, to an `OutputError`.

    Raises:
        OutputError: names the file that cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {shown(str(path))}: {error.strerror}."
        ) from error


def write_json(path: pathlib.Path, document: Any, indent: int | None = 1) -> None:
    """Writes a document as an indented JSON file; `indent` None writes one line.

    Raises:
        OutputError: if the file cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(document, indent=indent) + "\n")
