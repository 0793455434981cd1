"""Where commands write: what cannot be written is refused before they run."""

import argparse
import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ub.errors import UbError, shown

_PICTURES = (".png", ".pdf", ".svg")


class OutputError(UbError, OSError):
    """A file cannot be written."""


class InputError(UbError, OSError):
    """A file cannot be read."""


def output_path(text: str) -> pathlib.Path:
    """Reads an option that names a file to be written.

    Raises:
        argparse.ArgumentTypeError: if it is a folder, if its folder does not exist, or
            if it may not be written.
    """
    path = pathlib.Path(text)
    try:
        path.exists()
    except (OSError, ValueError) as error:  # too long, or a null byte
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no name of a file: {getattr(error, 'strerror', error)}."
        ) from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is a folder. Name a file in it."
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {shown(str(path.parent))} for {shown(path.name)}. "
            "Make it first."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} may not be written. Name another file, or change who may."
        )
    return path


def picture_path(text: str) -> pathlib.Path:
    """Reads an option that names a picture to be drawn; its ending says which kind.

    Raises:
        argparse.ArgumentTypeError: as `output_path`, and for another ending.
    """
    path = output_path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} ends in none of {', '.join(_PICTURES)}. Name a picture."
        )
    return path


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Says which file it is that cannot be written, as where a disk is full.

    Raises:
        OutputError: for an `OSError` in the block.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {shown(str(path))}: {error.strerror}."
        ) from error


def write_json(path: pathlib.Path, document: Any, indent: int | None = 1) -> None:
    """Writes a document.

    Raises:
        OutputError: if it cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(document, indent=indent) + "\n")
