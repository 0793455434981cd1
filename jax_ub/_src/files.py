"""Checks and writes the output files of `python -m jax_ub` commands."""

import argparse
import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jax_ub._src.errors import UbError, shown

_PICTURES = (".png", ".pdf", ".svg")


class OutputError(UbError, OSError):
    """A file cannot be written."""


class InputError(UbError, OSError):
    """A file cannot be read."""


def output_path(text: str) -> pathlib.Path:
    """Checks that a command-line option names a file that can be written.

    Raises:
        argparse.ArgumentTypeError: if the path is a folder, if its folder does not
            exist, or if the permissions do not allow to write it.
    """
    path = pathlib.Path(text)
    try:
        path.exists()
    except (OSError, ValueError) as error:  # the name is too long or has a null byte
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
    """Checks that a command-line option names an image file that can be written.

    The suffix selects the format: .png, .pdf or .svg.

    Raises:
        argparse.ArgumentTypeError: if the suffix is unknown, or if `output_path`
            rejects the path.
    """
    path = output_path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} ends in none of {', '.join(_PICTURES)}. Name a picture."
        )
    return path


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
