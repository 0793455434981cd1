"""Writes files, with one-line errors if a file cannot be read or written."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ub._src.errors import OutputError, shown


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
